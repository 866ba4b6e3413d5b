"""Measure the effect of autocast on each operation with the installed torch.

On the CPU the operations run; for other devices they get fake tensors, which pass the same autocast kernels and compute
nothing.
"""

from collections.abc import Callable
from contextlib import nullcontext
from operator import methodcaller

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from instruments.errors import ConfigError

FLOAT32, KEPT, LOWERED, REFUSED = "float32", "kept", "lowered", "refused"

_Operation = Callable[[Tensor], Tensor]
# By name; the input is a (4, 4) tensor of values between 0 and 1.
_OPERATIONS: dict[str, _Operation] = {
    **{
        name: methodcaller(name)
        for name in ("sum", "mean", "var", "std", "norm", "prod", "square", "exp", "log", "rsqrt", "sigmoid")
    },
    **{name: methodcaller(name, -1) for name in ("softmax", "log_softmax", "logsumexp", "cumsum", "cumprod")},
    "softmin": lambda x: functional.softmin(x, -1),
    "vector_norm": torch.linalg.vector_norm,
    "pow": lambda x: x.pow(2),
    "layer_norm": lambda x: functional.layer_norm(x, (4,)),
    "binary_cross_entropy": lambda x: functional.binary_cross_entropy(x, x),
    "binary_cross_entropy_with_logits": lambda x: functional.binary_cross_entropy_with_logits(x, x),
    "cross_entropy": lambda x: functional.cross_entropy(x, x.argmax(-1)),
    "nll_loss": lambda x: functional.nll_loss(x, x.argmax(-1)),
    "mse_loss": lambda x: functional.mse_loss(x, x),
    "l1_loss": lambda x: functional.l1_loss(x, x),
    "smooth_l1_loss": lambda x: functional.smooth_l1_loss(x, x),
    "huber_loss": lambda x: functional.huber_loss(x, x),
    "kl_div": lambda x: functional.kl_div(x, x, reduction="batchmean"),
    "linear": lambda x: functional.linear(x, x),
    "matmul": lambda x: x @ x,
    "bmm": lambda x: torch.bmm(x.expand(2, 4, 4), x.expand(2, 4, 4)),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
}


def probe_autocast(device: str) -> dict[str, str]:
    """Effect of autocast on every operation on a kind of device.

    Returns:
        By name: lowered (float32 inputs give 16 bits), float32 (16-bit inputs give float32), kept (the type of the
        inputs), refused (raises).
    Raises:
        ConfigError: torch has no autocast for this device.
    """
    try:
        available = torch.amp.is_autocast_available(device)
    except RuntimeError:  # a device type unknown to torch
        available = False
    if not available:
        raise ConfigError(
            f"torch {torch.__version__} has no autocast for {device!r}", where="device", do="device=cuda, or device=cpu"
        )
    low = torch.get_autocast_dtype(device)
    was = torch.is_autocast_enabled(device)
    with nullcontext() if device == "cpu" else FakeTensorMode(), torch.no_grad():
        # Not by torch.autocast, which turns itself off without such a device.
        torch.set_autocast_enabled(device, True)
        try:
            return {name: _ask(operation, device, low) for name, operation in _OPERATIONS.items()}
        finally:
            torch.set_autocast_enabled(device, was)


def _ask(operation: _Operation, device: str, low: torch.dtype) -> str:
    try:
        of_low = operation(torch.full((4, 4), 0.5, dtype=low, device=device)).dtype
        of_full = operation(torch.full((4, 4), 0.5, device=device)).dtype
    except (RuntimeError, NotImplementedError):
        return REFUSED
    if of_low == torch.float32:
        return FLOAT32
    return LOWERED if of_full == low else KEPT
