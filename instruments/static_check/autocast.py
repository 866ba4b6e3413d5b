"""Effect of autocast on each operation, and names of torch functions in code."""

import ast
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from operator import methodcaller

from instruments.errors import ConfigError

# Loss module → loss function.
LOSS_MODULES = {
    "BCELoss": "binary_cross_entropy", "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "cross_entropy", "NLLLoss": "nll_loss", "KLDivLoss": "kl_div", "MSELoss": "mse_loss",
    "L1Loss": "l1_loss", "SmoothL1Loss": "smooth_l1_loss", "HuberLoss": "huber_loss",
}  # fmt: skip
LOSSES = frozenset(LOSS_MODULES.values())
ACTIVATIONS = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Sigmoid": "sigmoid"}
SOFTMAXES = frozenset({"softmax", "log_softmax", "softmin"})
REDUCTIONS = frozenset({
    "sum", "mean", "var", "std", "norm", "vector_norm", "prod", "cumsum", "cumprod", "logsumexp",
})  # fmt: skip
PRODUCTS = frozenset({"linear", "matmul", "bmm", "einsum"})
NORMS = frozenset({"layer_norm", "batch_norm", "group_norm"})
KNOWN = (
    LOSSES | SOFTMAXES | REDUCTIONS | PRODUCTS | NORMS
    | {"pow", "square", "exp", "log", "log1p", "rsqrt", "sigmoid", "max", "amax"}
)  # fmt: skip


FLOAT16, BFLOAT16, LOW, FLOAT32 = "float16", "bfloat16", "low", "float32"  # LOW: one of the 16-bit formats
DTYPES = {
    "float16": FLOAT16, "half": FLOAT16, "fp16": FLOAT16, "bfloat16": BFLOAT16, "bf16": BFLOAT16,
    "float32": FLOAT32, "float": FLOAT32, "float64": FLOAT32, "double": FLOAT32, "fp32": FLOAT32, LOW: LOW,
}  # fmt: skip
_PLACES = ("", "amp.", "cuda.amp.", "cpu.amp.", "amp.autocast_mode.", "cuda.amp.autocast_mode.")
AUTOCASTS = {f"torch.{place}autocast" for place in _PLACES}


@cache
def autocast_table(device: str) -> dict[str, str]:
    """Measure the effect of autocast on every operation on a kind of device, with the installed torch.

    On the CPU the operations run; for other devices they get fake tensors, which pass the same autocast kernels and
    compute nothing.

    Returns:
        By name: lowered (float32 inputs give 16 bits), float32 (16-bit inputs give float32), kept (the type of the
        inputs), refused (raises).
    Raises:
        ConfigError: torch has no autocast for this device.
    """
    import torch  # noqa: PLC0415 - slow, and only needed for code with autocast
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415
    from torch.nn import functional  # noqa: PLC0415

    try:
        available = torch.amp.is_autocast_available(device)
    except RuntimeError:  # a device type unknown to torch
        available = False
    if not available:
        raise ConfigError(
            f"torch {torch.__version__} has no autocast for {device!r}", where="device", do="device=cuda, or device=cpu"
        )

    def loss(run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return run(x, x, reduction="sum")

    # Each takes a (4, 4) tensor of values between 0 and 1.
    losses = LOSSES - {"cross_entropy", "nll_loss"}
    operations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        **{name: methodcaller(name) for name in ("sum", "mean", "var", "std", "norm", "prod", "square", "exp", "log")},
        **{name: methodcaller(name) for name in ("rsqrt", "sigmoid")},
        **{name: methodcaller(name, -1) for name in ("softmax", "log_softmax", "logsumexp", "cumsum", "cumprod")},
        **{name: partial(loss, getattr(functional, name)) for name in losses},
        "cross_entropy": lambda x: functional.cross_entropy(x, x.argmax(-1)),
        "nll_loss": lambda x: functional.nll_loss(x, x.argmax(-1)),
        "softmin": lambda x: functional.softmin(x, -1),
        "vector_norm": torch.linalg.vector_norm,
        "pow": lambda x: x.pow(2),
        "layer_norm": lambda x: functional.layer_norm(x, (4,)),
        "linear": lambda x: functional.linear(x, x),
        "matmul": lambda x: x @ x,
        "bmm": lambda x: torch.bmm(x.expand(2, 4, 4), x.expand(2, 4, 4)),
        "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    }

    def effect(operation: Callable[[torch.Tensor], torch.Tensor]) -> str:
        try:
            of_low = operation(torch.full((4, 4), 0.5, dtype=low, device=device)).dtype
            of_full = operation(torch.full((4, 4), 0.5, device=device)).dtype
        except (RuntimeError, NotImplementedError):
            return "refused"
        if of_low == torch.float32:
            return "float32"
        return "lowered" if of_full == low else "kept"

    low = torch.get_autocast_dtype(device)
    was = torch.is_autocast_enabled(device)
    with nullcontext() if device == "cpu" else FakeTensorMode(), torch.no_grad():
        # Not by torch.autocast, which turns itself off without such a device.
        torch.set_autocast_enabled(device, True)
        try:
            return {name: effect(operation) for name, operation in operations.items()}
        finally:
            torch.set_autocast_enabled(device, was)


def text_of(node: ast.AST | None) -> str:
    """`a.b.c` for names and attributes; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if not isinstance(node, ast.Attribute):
        return ""
    known: dict[str, str] = vars(node)  # kept at the node: asked for several times a call
    if "text" not in known:
        head = text_of(node.value)
        known["text"] = head and f"{head}.{node.attr}"
    return known["text"]


def called_name(call: ast.Call) -> str:
    """Last name of the called function: `f` for `f()`, `a.f()` and `a().f()`."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else text_of(call.func)


def last_word(text: str) -> str:
    """The part after the last dot."""
    return text.rpartition(".")[2]
