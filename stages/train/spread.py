"""From constant gates to gates that speak: router logits are stretched little by little while everything learns.

A carve of assemble.mode=parity starts with logits so small that all chosen experts weigh the same. Stretching routers'
rows and its selection bias by one factor leaves its choices alone and lets its gates speak; a slow stretch gives the
experts time to follow.
"""

from dataclasses import dataclass

import torch
from torch import nn

from models.capture.router_watch import selection_bias


@dataclass(frozen=True)
class SpreadSchedule:
    """Standard deviation of a token's router logits by optimizer step, if nothing but the stretch changed it."""

    start: float
    end: float
    steps: int  # over which it grows

    def at(self, step: int) -> float:
        """The spread after `step` steps."""
        return self.start + (self.end - self.start) * min(1.0, step / self.steps)

    def factor(self, step: int) -> float:
        """What the routers are to be multiplied by after `step` steps, having followed so far."""
        return self.at(step) / self.at(step - 1)


def make_schedule(start: float, end: float, steps: int) -> SpreadSchedule:
    """From `start`; never shrinking: an `end` that is smaller, or 0, leaves the spread as it is."""
    return SpreadSchedule(start, max(start, end), max(1, steps))


@torch.no_grad()
def stretch(routers: list[nn.Module], factor: float) -> None:
    """Multiply all rows and selection biases, in place."""
    if factor == 1.0:
        return
    for router in routers:
        weight: torch.Tensor = router.weight  # type: ignore[assignment]
        weight.mul_(factor)
        bias_E = selection_bias(router)
        if bias_E is not None:
            bias_E.mul_(factor)
