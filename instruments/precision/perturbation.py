"""What the passes of auto_diff change: low precision, perturbed outputs, restored buffers; and equal choices."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from instruments.dtypes import dtype_name
from instruments.errors import ConfigError
from instruments.hooks import Call, hookable_modules
from instruments.precision.comparison import Distance, changed_rows, find_format, measure_distance, ulp
from instruments.shapes import Shaped
from instruments.tensors import as_real, find_tensors, map_tensors

AUTOCAST, CAST = "autocast", "cast"


class LowPrecision:
    """The model in low precision: the FP32 reference under autocast, or a copy cast to the format."""

    def __init__(self, reference: nn.Module, precision: str | torch.dtype, mode: str, cast: nn.Module | None) -> None:
        """`cast`: the caller's own low-precision copy, or None. Raises ConfigError: unknown mode or precision."""
        if mode not in {AUTOCAST, CAST}:
            raise ConfigError(
                f"mode={mode} is none of {AUTOCAST}, {CAST}", where="argument mode", do=f"mode={AUTOCAST}"
            )
        self.dtype, self.mode = find_format(precision), mode
        if self.dtype.itemsize != 2:
            what = f"precision={dtype_name(self.dtype)} is no precision models run in"
            raise ConfigError(what, where="argument precision", do="precision=bfloat16, or float16")
        self.model = reference if mode == AUTOCAST else cast or copy.deepcopy(reference).to(self.dtype)

    def active(self, device: torch.device) -> AbstractContextManager[object]:
        """Context in which modules of `model` compute in low precision."""
        return torch.autocast(device.type, self.dtype) if self.mode == AUTOCAST else nullcontext()

    def convert(self, arguments: Any, types: Sequence[torch.dtype | None] | None) -> Any:  # noqa: ANN401
        """Copy FP32 arguments in the formats `types`; without a match in the cast's format, or FP32 under autocast."""
        count = len(find_tensors(arguments))
        if types is None or len(types) != count:
            types = [self.dtype if self.mode == CAST else None] * count
        kinds = iter(types)
        return map_tensors(lambda tensor: _convert(tensor, next(kinds)), arguments)


def types_of(arguments: Any) -> list[torch.dtype | None]:  # noqa: ANN401 - any input of a module
    """Number format of each tensor among a call's arguments; None if it is not floating-point."""
    return [tensor.dtype if tensor.is_floating_point() else None for tensor in find_tensors(arguments).values()]


def _convert(leaf: Tensor, kind: torch.dtype | None) -> Tensor:
    if kind is None or not leaf.is_floating_point():
        return leaf.clone()  # the module may write into it
    # A mask's −3e38 becomes the lowest finite value, not −inf: a fully masked row would give NaN.
    limit = torch.finfo(kind).max
    bounded = leaf.clamp(-limit, limit) if limit < torch.finfo(leaf.dtype).max else leaf
    return torch.where(leaf.isfinite(), bounded, leaf).to(kind, copy=True)


class Perturbation:
    """Moves each value up or down by one unit in the last place of a format; seeded coin tosses choose the sign.

    The error of rounding to nearest is uniform, at most half a unit, so this is sqrt(12) times the noise of one
    rounding: a module may round about twelve times inside before it exceeds this.

    Source: Monte Carlo arithmetic (Parker 1997), with coin tosses instead of uniform noise.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype, self.seed, self._series = dtype, seed, seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, values: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """Perturb the values; integers and non-finite values stay unchanged."""
        if values.is_complex():
            return torch.view_as_complex(self(as_real(values)).contiguous())
        if not values.is_floating_point() or not values.numel():
            return values.clone()
        if values.device not in self._generators:
            self._generators[values.device] = torch.Generator(values.device).manual_seed(self._series)
        generator = self._generators[values.device]
        coins = torch.randint(0, 2, values.shape, generator=generator, device=values.device).mul_(2).sub_(1)
        moved = values + coins * ulp(values.float(), self.dtype).to(values.dtype)
        return torch.where(values.isfinite(), moved, values)

    def restart(self, draw: int = 0) -> None:
        """Restart the coin tosses; each draw has its own series."""
        self._generators.clear()
        self._series = self.seed + draw

    def of(self, value: Any) -> Any:  # noqa: ANN401 - any input or output of a module
        """Perturb all tensors in a value."""
        return map_tensors(self, value)

    @contextmanager
    def on_outputs(self, model: nn.Module) -> Iterator[None]:
        """Perturb the outputs of all modules in `model`; low precision rounds the same tensors."""
        with ExitStack() as hooks:
            for _name, module in hookable_modules(model):
                hooks.enter_context(module.register_forward_hook(lambda _module, _args, output: self.of(output)))
            yield


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers (tensor objects and values) on exit."""
    held = [
        (module._buffers, name, buffer, None if buffer is None else (buffer.clone(), buffer._version))
        for _name, module in hookable_modules(model)
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for owner, name, buffer, kept in held:
            owner[name] = buffer
            if buffer is not None and kept is not None and buffer._version != kept[1]:
                buffer.copy_(kept[0])


Key = tuple[Call, str]


def is_choice(tensor: Tensor) -> bool:
    """Whether a tensor holds discrete choices: not floating-point or complex, not a scalar, not empty."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.ndim > 0 and tensor.numel() > 0


class EqualChoiceRows:
    """Tracks the tokens with equal discrete choices in two runs; errors are measured on these tokens only."""

    def __init__(self, reference: Mapping[Key, Tensor] | None = None, low: Mapping[Key, Tensor] | None = None) -> None:
        """Start with the choices that both runs have made so far."""
        self._by_count: dict[int, Tensor] = {}
        self._sorted: set[int] = set()
        for key, tensor in (low or {}).items():
            if reference and key in reference:
                self.update(reference[key], tensor)

    def update(self, reference: Shaped[Tensor, "..."], low: Shaped[Tensor, "..."]) -> float | None:
        """Record one more choice; returns the share of rows with a different choice, None if shapes differ."""
        if reference.shape != low.shape:
            return None
        changed = changed_rows(reference, low.to(reference.device))
        if not torch.equal(reference, low.to(reference.device)):  # order inside a row breaks ties of a later sort
            self._sorted.add(reference.numel())
        if len(changed) > 1:
            known = self._by_count.get(len(changed))
            self._by_count[len(changed)] = ~changed if known is None else known.to(changed.device) & ~changed
        return float(changed.double().mean())

    def distance(self, exact: Shaped[Tensor, "..."], found: Tensor | None) -> Distance | None:
        """Distance over the tokens with equal choices; over all tokens if there are none.

        None if shapes differ, and for tensors with one row per token and expert once a choice has changed: such rows
        are sorted by expert, so one changed choice moves all of them.
        """
        if found is None or found.shape != exact.shape:
            return None
        count = exact.numel() // exact.shape[-1] if exact.ndim and exact.numel() else 0
        if count in self._sorted:
            return None
        rows = self._by_count.get(count)
        alike = rows.to(exact.device) if rows is not None and bool(rows.any()) and not bool(rows.all()) else None
        return measure_distance(exact, found.to(exact.device), alike)
