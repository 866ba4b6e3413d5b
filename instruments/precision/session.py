"""What the passes of one comparison share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from instruments.precision.calls import Call
from instruments.precision.choices import Key
from instruments.precision.comparison import Distance
from instruments.precision.findings import ChoiceDiff, Diff, OutputDiff
from instruments.precision.low_precision import LowPrecision, Perturbation


@dataclass
class Session:
    """The models, and tensors that wait on the host: those of the low precision, then those of the reference."""

    reference: nn.Module
    low: LowPrecision
    perturbation: Perturbation
    device: torch.device
    wanted: frozenset[str]  # names of modules that are compared
    budget: int  # bytes that may wait
    waiting: dict[Key, Tensor] = field(default_factory=dict)
    types: dict[Call, list[torch.dtype | None]] = field(default_factory=dict)  # of arguments in low precision
    choosers: set[str] = field(default_factory=set)  # modules with integer outputs
    low_choices: dict[Key, Tensor] = field(default_factory=dict)
    reference_choices: dict[Key, Tensor] = field(default_factory=dict)
    outputs: dict[Key, OutputDiff] = field(default_factory=dict)
    choices: dict[Key, ChoiceDiff] = field(default_factory=dict)
    order: dict[Call, int] = field(default_factory=dict)
    windows: int = 0
    _seen: set[Key] = field(default_factory=set)
    _bytes: int = 0
    _left: bool = True

    def begin_window(self) -> bool:
        """Whether anything is left to compare; the passes that follow are about it."""
        if not self._left:
            return False
        self.waiting, self._bytes, self._left = {}, 0, False
        self.windows += 1
        return True

    def keep(self, key: Key, low: Tensor) -> None:
        """Let an output in low precision wait, if there is room; its reference will take as much as 4 bytes a value."""
        if key in self._seen or key[0].module not in self.wanted:
            return
        size = 4 * low.numel()
        if self.waiting and self._bytes + size > self.budget:
            self._left = True
            return
        self._bytes += size
        self._seen.add(key)
        self.waiting[key] = low.to("cpu", copy=True)

    def floor(self, perturbed: Distance, *, chained: bool) -> float:
        """What a perturbed run says of an output, at least half a unit in the last place; `chained`: a whole one.

        An output that consists of one huge value nearly is off by as much, whichever way the coins fell, and by more
        where it has gone through several modules.
        """
        return max(perturbed.normalised_l2, self.low.low.epsilon * (1.0 if chained else 0.5))

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Whatever is drawn within begins at the same place, and moves nobody else's generator."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.perturbation.seed)
            yield

    def finish(self, diff: Diff) -> None:
        """Hand over what was found, in the order of the reference."""
        diff.outputs = sorted(self.outputs.values(), key=lambda output: self.order[output.call])
        diff.choices = sorted(self.choices.values(), key=lambda choice: self.order[choice.call])
        called = {call.module for call in self.order}
        diff.unused = list(_never_called(self.reference, called))
        diff.only_one = [str(call) for call in self.types.keys() ^ self.order.keys()]


def _never_called(model: nn.Module, called: set[str]) -> Iterator[str]:
    """The outermost modules that did not run, leaving out mere lists of modules."""
    found: list[str] = []
    for name, module in model.named_modules():
        runs = getattr(type(module), "forward", None) is not nn.Module.forward
        if name and runs and name not in called and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    yield from found
