import pytest

from pipeline.settings import unneeded
from stages.assemble.config import AssembleConfig
from stages.assemble.stage import load_advice
from stages.calibration.config import ROUTERS, TRAINED_ROUTERS


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"router": "residual_ridge"}, "assemble.router=error assemble.router_steps=200 assemble.balance=0.01"),
        # `balance` has no effect on a router without training.
        ({"router": "random", "balance": 5.0}, "assemble.router=error assemble.router_steps=200 assemble.balance=0.01"),
        ({"router": "error"}, "assemble.router_steps=200 assemble.balance=0.01"),
        ({"router": "error", "router_steps": 9}, "assemble.balance=0.01"),
        ({"router": "error", "router_steps": 9, "balance": 0.02}, "assemble.balance=0.2"),
    ],
)
def test_the_advice_names_what_is_missing(settings, advice):
    assert load_advice(AssembleConfig(**settings)) == advice


@pytest.mark.parametrize("router", ROUTERS)
def test_only_trained_routers_of_layers_pay_for_uneven_load(router):
    config = AssembleConfig(router=router, balance=0.5)
    assert config.balance_weight(pooled=False) == (0.5 if router in TRAINED_ROUTERS else 0.0)
    assert config.balance_weight(pooled=True) == 0.0
    assert ("balance" in unneeded(config)) == (router not in TRAINED_ROUTERS)
