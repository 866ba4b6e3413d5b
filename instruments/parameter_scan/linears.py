"""Norms of Linear layers; on a GPU, where starting operators takes longest, those of equal sizes at once."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from instruments.device import free_device_memory, is_launch_bound
from instruments.gradients import block_squares, join
from instruments.parameter_scan.inputs import InputSquares, join_inputs
from instruments.parameter_scan.targets import Target
from instruments.tensors import version_of

# Numbers of inputs and gradients that wait on a GPU, and free bytes that it needs for each.
_WAITING, _ROOM = 2**28, 32
Item = TypeVar("Item")


@dataclass(frozen=True)
class LinearGradient:
    """A Linear's input, and the gradient of its output."""

    target: Target
    seen: InputSquares
    grad_BTO: Tensor
    version: int | None  # of the gradient

    @property
    def changed(self) -> bool:
        """Whether someone has changed the tensors while they waited."""
        return self.seen.changed or self.version != version_of(self.grad_BTO)

    @property
    def kind(self) -> Hashable:
        """Equal for layers that can be computed at once."""
        widths = self.target.parameter.in_width, self.target.parameter.out_width
        return self.seen.kind, self.grad_BTO.shape, self.grad_BTO.dtype, widths


@dataclass
class WaitingLinears:
    """Layers of one backward pass that have not been measured yet."""

    _waiting: list[LinearGradient] = field(default_factory=list)
    _numbers: int = 0
    _most: int = 0

    @property
    def device(self) -> torch.device | None:
        """That of the last layer; None if none waits."""
        return self._waiting[-1].grad_BTO.device if self._waiting else None

    def add(self, target: Target, seen: InputSquares, grad_BTO: Tensor) -> bool:
        """Let a layer wait; returns whether `measure` is due."""
        if not is_launch_bound(grad_BTO.device):
            self._most = 0
        elif not self._waiting:
            free = free_device_memory(grad_BTO.device)
            self._most = _WAITING if free is None else min(_WAITING, free // _ROOM)
        self._waiting.append(LinearGradient(target, seen, grad_BTO, version_of(grad_BTO)))
        self._numbers += seen.x_BTI.numel() + grad_BTO.numel()
        return self._numbers > self._most

    def measure(self, product: str) -> Iterator[tuple[Target, tuple[Tensor, Tensor, Tensor] | None]]:
        """All that wait, with squares of input blocks, and of the gradient by input and output blocks, ``(B, blocks)``.

        `product`: see `prefer_gram`. None instead of squares: a tensor has been changed in place.
        """
        calls, self._waiting, self._numbers = self._waiting, [], 0
        yield from ((call.target, None) for call in calls if call.changed)
        calls = [call for call in calls if not call.changed]
        for inputs in _alike({id(call.seen): call.seen for call in calls}.values()):
            join_inputs(inputs)
        for group in _alike(calls):
            parts = (squares_Bn.split(len(group[0].grad_BTO)) for squares_Bn in _gradient_squares(group, product))
            for call, in_Bi, out_Bo in zip(group, *parts, strict=True):
                yield call.target, (call.seen.block_squares_Bi, in_Bi, out_Bo)


def _gradient_squares(calls: Sequence[LinearGradient], product: str) -> tuple[Tensor, Tensor]:
    """`block_squares` of calls of one kind, as of one with the samples of all."""
    seen, parameter = [call.seen for call in calls], calls[0].target.parameter
    x_BTI, grad_BTO = join([one.x_BTI for one in seen]), join([call.grad_BTO for call in calls])
    widths = parameter.in_width, parameter.out_width
    return block_squares(x_BTI, grad_BTO, widths, product=product, gram=lambda: join([one.gram_BTT for one in seen]))


def _alike(items: Iterable[Item]) -> Iterable[list[Item]]:
    """The items, those of equal `kind` together."""
    groups: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        groups[item.kind].append(item)  # type: ignore[attr-defined]
    return groups.values()
