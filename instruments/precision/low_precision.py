"""The ways in which a model runs in low precision, and what one unit in the last place does to it."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from instruments.errors import ConfigError
from instruments.precision.calls import map_tensors
from instruments.precision.comparison import NumberFormat

AUTOCAST, CAST = "autocast", "cast"
MODES = (AUTOCAST, CAST)
# What a module may raise for a number format that it was not written for.
FAILURES = (RuntimeError, TypeError, ValueError, AssertionError)


class LowPrecision:
    """A model in low precision: the weights of the FP32 reference under autocast, or a copy that is cast."""

    def __init__(self, reference: nn.Module, low: NumberFormat, mode: str, cast: nn.Module | None) -> None:
        """Make what runs in low precision; `cast` is a copy that the caller has made. Raises ConfigError."""
        if mode not in MODES:
            raise ConfigError(
                f"mode={mode} is none of {', '.join(MODES)}", where="argument mode", do=f"mode={AUTOCAST}"
            )
        self.low, self.mode = low, mode
        self.model = reference if mode == AUTOCAST else cast or copy.deepcopy(reference).to(low.dtype)
        if mode == CAST:
            self.model.eval()

    @contextmanager
    def active(self, device: torch.device) -> Iterator[None]:
        """Within, modules of `model` compute in low precision."""
        with torch.autocast(device.type, self.low.dtype) if self.mode == AUTOCAST else nullcontext():
            yield

    def types_of(self, arguments: Any) -> list[torch.dtype | None]:  # noqa: ANN401 - any input of a module
        """The number format of every tensor among the arguments of a call, None for what is no floating-point one."""
        return [
            leaf.dtype if isinstance(leaf, Tensor) and leaf.is_floating_point() else None
            for leaf in tree_flatten(arguments)[0]
        ]

    def convert(self, arguments: Any, types: Sequence[torch.dtype | None] | None) -> Any:  # noqa: ANN401
        """FP32 arguments copied into the formats that the module gets when all runs in low precision.

        Args:
            arguments: of the reference's call.
            types: what `types_of` said of the same call; None where there was none: the cast's own format.
        """
        leaves, spec = tree_flatten(arguments)
        if types is None or len(types) != len(leaves):
            types = [self.low.dtype if self.mode == CAST else None] * len(leaves)
        return tree_unflatten([_convert(leaf, kind) for leaf, kind in zip(leaves, types, strict=True)], spec)


def _convert(leaf: Any, kind: torch.dtype | None) -> Any:  # noqa: ANN401 - any leaf of the arguments
    if not isinstance(leaf, Tensor):
        return leaf
    if kind is None or not leaf.is_floating_point():
        return leaf.clone()  # the module may write into it
    # The mask's −3e38 becomes the lowest value, not −inf: rows of it alone would give NaN.
    limit = torch.finfo(kind).max
    bounded = leaf.clamp(-limit, limit) if limit < torch.finfo(leaf.dtype).max else leaf
    return torch.where(leaf.isfinite(), bounded, leaf).to(kind, copy=True)


class Perturbation:
    """Adds or takes away one unit in the last place of a format, by a seeded coin for every value.

    Rounding to the nearest is off by a uniform half unit at most, so this is sqrt(12) times the noise of one rounding:
    a module may round about twelve times inside before it stands out.

    Source: Monte Carlo arithmetic (Parker 1997), with coins instead of uniform noise.
    """

    def __init__(self, low: NumberFormat, seed: int) -> None:
        """`seed` decides every coin."""
        self.low, self.seed, self._series = low, seed, seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, values: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """The values perturbed; integers, and values that are not finite, as they are."""
        if not values.is_floating_point() or not values.numel():
            return values
        generator = self._generators.get(values.device)
        if generator is None:
            generator = torch.Generator(values.device).manual_seed(self._series)
            self._generators[values.device] = generator
        coins = torch.randint(0, 2, values.shape, generator=generator, device=values.device).mul_(2).sub_(1)
        moved = values + coins * self.low.ulp(values.float()).to(values.dtype)
        return torch.where(values.isfinite(), moved, values)

    def restart(self, draw: int = 0) -> None:
        """Begin again with the first coin, of another series for every draw."""
        self._generators.clear()
        self._series = self.seed + draw

    def of(self, value: Any) -> Any:  # noqa: ANN401 - any input or output of a module
        """The same with all its tensors perturbed."""
        return map_tensors(self, value)

    @contextmanager
    def on_outputs(self, model: nn.Module) -> Iterator[None]:
        """Perturb what every module in it returns, as low precision rounds what one hands to the next."""

        def perturb(_module: nn.Module, _args: Any, output: Any) -> Any:  # noqa: ANN401
            return self.of(output)

        handles = [module.register_forward_hook(perturb) for module in model.modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
