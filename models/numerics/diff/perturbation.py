"""What one unit in the last place of low precision does to a model that computes in FP32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from models.numerics.formats import NumberFormat
from models.numerics.nested import map_tensors


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

    def of(self, value: Any) -> Any:  # noqa: ANN401 - whatever a module takes or returns
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
