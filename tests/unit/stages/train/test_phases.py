from unittest.mock import Mock

import pytest
import torch

from models.training import Part
from stages.train import phases
from stages.train.config import TrainConfig
from stages.train.phases import Phase, PhaseCallback, make_phases, rate_factor, rates_of


def test_phases_follow_each_other_and_have_their_share():
    settings = TrainConfig(tokens=1000, router_share=0.2, experts_share=0.5, all_share=0.3)
    phases = make_phases(settings, step_tokens=10)
    assert [(phase.name, phase.first, phase.steps) for phase in phases] == [
        ("router", 0, 20),
        ("experts", 20, 50),
        ("all", 70, 30),
    ]
    assert phases[-1].last == 100


def test_a_phase_without_a_share_is_none_and_a_small_one_has_a_step():
    settings = TrainConfig(tokens=100, router_share=0.001, experts_share=0.0, all_share=0.9)
    assert [(phase.name, phase.steps) for phase in make_phases(settings, 10.0)] == [("router", 1), ("all", 9)]


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


def test_the_speed_counts_neither_heldout_text_nor_saving(monkeypatch):
    clock, context = [0.0], Mock(settings=TrainConfig(log_steps=1, heldout_steps=1), total=9, dtype=torch.float32)
    monkeypatch.setattr(phases, "time", Mock(perf_counter=lambda: clock[0]))

    def spend(seconds):
        clock[0] += seconds
        return {"heldout_loss": 1.0}

    context.heldout_figures.side_effect = lambda _model: spend(70)
    context.record.tokens = 0
    trainer = Mock(phase=Phase("all", 0, 9, frozenset(Part)), context=context, model=torch.nn.Identity())
    trainer.mark_saved.side_effect = lambda _folder: spend(700)
    callback, arguments = PhaseCallback(trainer), Mock(output_dir="somewhere")
    callback.on_train_begin(arguments, Mock(global_step=0, max_steps=9))
    for step in (1, 2):
        spend(5)
        callback.on_step_end(arguments, Mock(global_step=step), Mock(should_log=True))
        logs = {"tokens": 30, "language_model": 1.0, "loss": 1.0, "load_max_over_mean": 1.0}
        callback.on_log(arguments, Mock(global_step=step), None, logs)
        callback.on_save(arguments, Mock(global_step=step))
    callback.bar.close()
    figures = [call.args[2] for call in context.record.write.call_args_list]
    assert [line["tokens_per_second"] for line in figures if "tokens" in line] == [6.0, 6.0]
