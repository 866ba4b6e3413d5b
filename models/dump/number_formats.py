"""What a tensor's numbers really are, in the words of those who study number formats."""

import logging
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from models.dump.watched import Watched

logger = logging.getLogger(__name__)

_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4m3",
    torch.float8_e5m2: "fp8e5m2",
}


def quant_type_of(tensor: Tensor) -> str:
    """Its number format: fp32, bf16 ...; of a weight packed by bitsandbytes nf4, fp4 or int8."""
    state = getattr(tensor, "quant_state", None)  # of a Params4bit
    if state is not None:
        return str(state.quant_type)
    return _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def autocast_type_of(tensor: Tensor) -> str | None:
    """What matrix products of it are computed in under autocast; None without."""
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return _NAMES[torch.get_autocast_dtype(kind)]


def warn_of_label(label: str, watched: Sequence[Watched]) -> None:
    """Say where weights are not what they are said to be; records hold both."""
    weights = {id(weight): weight for one in watched for weight in one.module.parameters(recurse=False)}
    real = Counter(quant_type_of(weight) for weight in weights.values())
    others = {kind: count for kind, count in real.items() if kind != label}
    if others:
        found = ", ".join(f"{count} in {kind}" for kind, count in sorted(others.items()))
        logger.warning(
            "quant_type=%s is a label: the parameters of watched modules are %s; records say both", label, found
        )
