import pytest

from pipeline.settings import unneeded
from stages.assemble.config import AssembleConfig


@pytest.mark.parametrize("router", ["error", "random"])
def test_only_fitted_routers_of_layers_pay_for_uneven_load(router):
    config = AssembleConfig(router=router, balance=0.5)
    assert config.balance_weight(pooled=False) == (0.5 if router == "error" else 0.0)
    assert config.balance_weight(pooled=True) == 0.0
    assert ("balance" in unneeded(config)) == (router == "random")
