import pytest

from pipeline.settings import unneeded
from stages.assemble.config import AssembleConfig
from stages.calibration.config import ROUTERS, TRAINED_ROUTERS


@pytest.mark.parametrize("router", ROUTERS)
def test_only_trained_routers_of_layers_pay_for_uneven_load(router):
    config = AssembleConfig(router=router, balance=0.5)
    assert config.balance_weight(pooled=False, copied=False) == (0.5 if router in TRAINED_ROUTERS else 0.0)
    assert config.balance_weight(pooled=True, copied=False) == 0.0
    assert ("balance" in unneeded(config)) == (router not in TRAINED_ROUTERS)


@pytest.mark.parametrize("router", ROUTERS)
def test_where_experts_share_neurons_trained_routers_learn_an_even_load(router):
    trained, config = router in TRAINED_ROUTERS, AssembleConfig(router=router)
    assert (config.steps(copied=True), config.balance_weight(pooled=False, copied=True)) == (
        (200, 0.01) if trained else (0, 0)
    )
    assert (config.steps(copied=False), config.balance_weight(pooled=False, copied=False)) == (0, 0)


def test_given_values_count_with_and_without_shared_neurons():
    config = AssembleConfig(router_steps=0, balance=0.0)
    assert (config.steps(copied=True), config.balance_weight(pooled=False, copied=True)) == (0, 0)
