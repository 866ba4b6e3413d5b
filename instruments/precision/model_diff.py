"""Compare a model in low precision with FP32: where the outputs diverge, and which module causes it.

Each module has two errors: the propagated error, with the whole model in low precision, and its own error, with only
this module in low precision, on the FP32 inputs. Both are compared with the error floor: the response, in FP32, to one
unit in the last place. A module that amplifies every rounding is not at fault. The model's own output is also held to
absolute limits.
"""

import copy
import fnmatch
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from instruments.dtypes import dtype_name
from instruments.errors import ConfigError
from instruments.precision.findings import Diff
from instruments.precision.passes import Comparison
from instruments.precision.perturbation import AUTOCAST, LowPrecision, Perturbation
from instruments.precision.verdict import DiffLimits
from instruments.tensors import Arguments, find_tensors, map_tensors


@contextmanager
def reference_of(model: nn.Module) -> Iterator[nn.Module]:
    """The model in evaluation mode, or an FP32 copy if it is in another precision."""
    weights = [one.dtype for one in model.parameters() if one.is_floating_point()]
    held = [*weights, *(one.dtype for one in model.buffers() if one.is_floating_point())]
    if torch.float64 in weights or any(dtype.itemsize < 4 for dtype in held):
        yield copy.deepcopy(model).float().eval()
    else:
        with _evaluated(model):
            yield model


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; the training mode is restored on exit."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def arguments_of(
    model: nn.Module, sample: Mapping[str, Any] | Sequence[Any] | Tensor, device: torch.device
) -> Arguments:
    """Positional and keyword arguments, floating-point tensors in FP32; no key-value cache, as modules write to it."""
    if isinstance(sample, Tensor):
        sample = (sample,)
    args, kwargs = ((), dict(sample)) if isinstance(sample, Mapping) else (tuple(sample), {})
    if _takes_cache(model):
        kwargs.setdefault("use_cache", False)
    placed: Arguments = map_tensors(
        lambda tensor: tensor.to(device, torch.float32 if tensor.is_floating_point() else tensor.dtype), (args, kwargs)
    )
    return placed


def _takes_cache(model: nn.Module) -> bool:
    """Whether the model, or the one to which a wrapper such as PEFT's passes its arguments, takes `use_cache`."""
    parameters, inside = inspect.signature(model.forward).parameters, list(model.children())
    passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return "use_cache" in parameters or (passes_on and len(inside) == 1 and _takes_cache(inside[0]))


# Perturbed passes; in a single one, it is chance whether a choice near the border changes.
DRAWS = 3


@torch.no_grad()
def auto_diff(
    model: nn.Module,
    sample: Mapping[str, Any] | Sequence[Any] | Tensor,
    *,
    precision: str | torch.dtype = "bfloat16",
    mode: str = AUTOCAST,
    target_dtype: str | torch.dtype | None = None,
    low: nn.Module | None = None,
    modules: Sequence[str] = ("*",),
    limits: DiffLimits | None = None,
    seed: int = 0,
) -> Diff:
    """Compare a model in low precision with itself in FP32.

    Args:
        model: runs in evaluation mode; its mode and buffers are restored. If it is not in FP32, an FP32 copy runs.
        sample: keyword arguments, or positional ones; copied.
        precision: bfloat16 or float16; "bf16" and "fp16" are the same.
        target_dtype: the same, as `analyze_tensor` calls it.
        mode: autocast, or cast: `model.to(precision)`.
        low: for mode=cast, a low-precision model made in another way (`from_pretrained(dtype=...)`).
        modules: globs on names of modules to compare; the model's own output always is. Their outputs stay in host
            memory, in FP32.
        limits: on errors; None: the defaults.
        seed: of the perturbation, and of random numbers that the model draws.
    Raises:
        ConfigError: an invalid setting.
        NumericsError: the model does not run in this precision.
    """
    wanted = _select(model, modules)
    with reference_of(model) as reference, nullcontext() if low is None else _evaluated(low):
        tensors = chain(reference.parameters(), reference.buffers(), find_tensors(sample).values())
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        lowered = LowPrecision(reference, target_dtype or precision, mode, low)
        diff = Diff(dtype_name(lowered.dtype), mode, limits or DiffLimits())
        passes = Comparison(reference, lowered, Perturbation(lowered.dtype, seed), device, wanted, diff)
        arguments = arguments_of(reference, sample, device)
        passes.run_low(arguments)
        passes.run_reference(arguments)
        for draw in range(DRAWS):
            passes.run_perturbed(arguments, draw)
        passes.finish()
    return diff


def _select(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    names = [name for name, _ in model.named_modules()]
    chosen = {""}
    for pattern in patterns:
        if not (fitting := fnmatch.filter(names, pattern)):
            example = names[len(names) // 2] or "*"
            do = f"modules=['{example}'], or ['*'] for all"
            raise ConfigError(f"no module is called {pattern}", where="setting modules", do=do)
        chosen.update(fitting)
    return frozenset(chosen)
