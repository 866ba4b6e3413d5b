import pytest

from pipeline.settings import unneeded
from stages.assemble.config import AssembleConfig
from stages.calibration.config import ROUTERS, TRAINED_ROUTERS


@pytest.mark.parametrize("router", ROUTERS)
def test_only_trained_routers_of_layers_pay_for_uneven_load(router):
    config = AssembleConfig(router=router, balance=0.5)
    assert config.balance_weight(pooled=False) == (0.5 if router in TRAINED_ROUTERS else 0.0)
    assert config.balance_weight(pooled=True) == 0.0
    assert ("balance" in unneeded(config)) == (router not in TRAINED_ROUTERS)
