import pytest

from models.training import Part
from stages.train.config import TrainConfig
from stages.train.loop import rates_of
from stages.train.objective import make_phases, rate_factor


@pytest.mark.parametrize(
    ("tokens", "shares", "phases"),
    [
        (1000, (0.2, 0.5, 0.3), [("router", 0, 20), ("experts", 20, 50), ("all", 70, 30)]),
        (100, (0.001, 0.0, 0.9), [("router", 0, 1), ("all", 1, 9)]),  # a small share has a step, one of 0 has none
    ],
)
def test_phases_follow_each_other_and_have_their_share(tokens, shares, phases):
    router, experts, everything = shares
    settings = TrainConfig(tokens=tokens, router_share=router, experts_share=experts, all_share=everything)
    found = make_phases(settings, step_tokens=10)
    assert [(phase.name, phase.first, phase.steps) for phase in found] == phases
    assert found[-1].last == sum(phases[-1][1:])


def test_parts_that_do_not_learn_have_no_rate():
    settings = TrainConfig(tokens=300, router_share=0.3, experts_share=0.3, all_share=0.4, router_rate=3.0,
                           expert_rate=2.0, rest_rate=1.0)  # fmt: skip
    router, experts, everything = make_phases(settings, 10.0)
    assert rates_of(router, settings) == {"router_rate": 3.0, "expert_rate": 0.0, "rest_rate": 0.0}
    assert rates_of(experts, settings) == {"router_rate": 3.0, "expert_rate": 2.0, "rest_rate": 0.0}
    assert rates_of(everything, settings) == {"router_rate": 3.0, "expert_rate": 2.0, "rest_rate": 1.0}
    assert everything.learns == frozenset(Part)


def test_rates_rise_and_fall_within_a_phase():
    settings = TrainConfig(tokens=1000, router_share=1.0, experts_share=0.0, warmup_share=0.1, final_rate=0.2)
    (phase,) = make_phases(settings, 10.0)
    factors = [rate_factor(step, phase, settings) for step in range(phase.steps + 1)]
    assert factors[0] == pytest.approx(1 / 11)
    assert max(factors) == factors[10] == pytest.approx(1.0)
    assert factors[:11] == sorted(factors[:11])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] == pytest.approx(0.2)


def test_rates_stay_at_their_peak_until_the_last_share_of_a_phase():
    settings = TrainConfig(tokens=1000, router_share=1.0, experts_share=0.0, warmup_share=0.1, decay_share=0.25)
    (phase,) = make_phases(settings, 10.0)
    factors = [rate_factor(step, phase, settings) for step in range(phase.steps + 1)]
    assert factors[10:76] == [1.0] * 66
    assert factors[76] < 1
    assert factors[-1] == pytest.approx(0.1)
    constant = TrainConfig(tokens=1000, router_share=1.0, experts_share=0.0, warmup_share=0.1, decay_share=0.0)
    assert rate_factor(99, phase, constant) == 1.0
