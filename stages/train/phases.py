"""Phases of training: the parts that learn, and their learning rates."""

import math
from dataclasses import dataclass

from models.training import Part
from stages.train.config import TrainConfig


@dataclass(frozen=True)
class Phase:
    """Consecutive optimizer steps in which the same parts learn."""

    name: str
    first: int  # number of steps of earlier phases
    steps: int
    learns: frozenset[Part]

    @property
    def last(self) -> int:
        """Number of steps at its end, earlier phases included."""
        return self.first + self.steps


_LEARNS = {
    "router": frozenset({Part.ROUTER}),
    "experts": frozenset({Part.ROUTER, Part.EXPERTS}),
    "all": frozenset(Part),
}


def make_phases(settings: TrainConfig, step_tokens: float) -> list[Phase]:
    """The phases with a share above 0, each of at least one step of `step_tokens` tokens."""
    phases: list[Phase] = []
    for name, learns in _LEARNS.items():
        share = getattr(settings, f"{name}_share")
        if share > 0:
            first = phases[-1].last if phases else 0
            phases.append(Phase(name, first, max(1, round(share * settings.tokens / step_tokens)), learns))
    return phases


def rate_factor(step: int, phase: Phase, settings: TrainConfig) -> float:
    """Share of the peak rate at a phase's step (from 0): a linear rise, 1, then half a cosine down to `final_rate`."""
    warmup = math.ceil(settings.warmup_share * phase.steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    start = max(warmup, math.floor((1 - settings.decay_share) * phase.steps))
    progress = min(1.0, max(0, step - start) / max(1, phase.steps - start))
    return settings.final_rate + (1 - settings.final_rate) * 0.5 * (1 + math.cos(math.pi * progress))
