"""Discrete choices of a model, such as experts of a token: where two runs chose alike."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor, nn

from instruments.precision.calls import Arguments, Call, find_tensors
from instruments.precision.comparison import changed_rows

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

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - whatever it returns
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
