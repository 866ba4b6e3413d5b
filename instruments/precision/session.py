"""What the passes of one comparison share."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor, nn

from instruments.precision.calls import Arguments, Call, find_tensors
from instruments.precision.comparison import Distance, changed_rows
from instruments.precision.findings import ChoiceDiff, Diff, OutputDiff
from instruments.precision.low_precision import LowPrecision, Perturbation

Key = tuple[Call, str]


def is_choice(tensor: Tensor) -> bool:
    """Whether it holds integers, row by row."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.ndim > 0 and tensor.numel() > 0


class Choices:
    """Integer outputs of a pass, by call and path."""

    def __init__(self) -> None:
        """Empty."""
        self.made: dict[Key, Tensor] = {}

    def before(self, call: Call, module: nn.Module, arguments: Arguments) -> None:
        """Nothing is chosen yet."""

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
        """Keep what was chosen."""
        for path, tensor in find_tensors(output).items():
            if is_choice(tensor):
                self.made[call, path] = tensor.clone()


class AlikeRows:
    """Tokens for which two runs have chosen alike so far; the others went other ways, which no error measures."""

    def __init__(self) -> None:
        """All of them."""
        self._by_count: dict[int, Tensor] = {}
        self._sorted: set[int] = set()

    @classmethod
    def between(cls, reference: Mapping[Key, Tensor], low: Mapping[Key, Tensor]) -> "AlikeRows":
        """By the choices that both have made."""
        rows = cls()
        for key, chosen in low.items():
            if key in reference:
                rows.update(reference[key], chosen)
        return rows

    def update(self, reference: Shaped[Tensor, "..."], low: Shaped[Tensor, "..."]) -> float | None:
        """Take one more choice into account; gives the share of rows that chose otherwise, None of another shape."""
        if reference.shape != low.shape:
            return None
        changed = changed_rows(reference, low.to(reference.device))
        if not torch.equal(reference, low.to(reference.device)):  # the order, too, decides how a sort breaks ties
            self._sorted.add(reference.numel())
        if len(changed) > 1:
            known = self._by_count.get(len(changed))
            self._by_count[len(changed)] = ~changed if known is None else known.to(changed.device) & ~changed
        return float(changed.double().mean())

    def comparable(self, tensor: Shaped[Tensor, "..."]) -> bool:
        """False for a row each for every expert of every token: sorted by expert, one other choice moves them all."""
        return not tensor.ndim or not tensor.numel() or tensor.numel() // tensor.shape[-1] not in self._sorted

    def of(self, tensor: Shaped[Tensor, "..."]) -> Bool[Tensor, "rows"] | None:
        """Which vectors of its last axis count; None: all, or there is none left."""
        if not tensor.ndim or not tensor.numel():
            return None
        rows = self._by_count.get(tensor.numel() // tensor.shape[-1])
        return rows.to(tensor.device) if rows is not None and bool(rows.any()) and not bool(rows.all()) else None


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
