"""Which modules of a model are watched."""

import logging
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from instruments.errors import ConfigError
from instruments.tensor_dump.config import TENSORS, DumpConfig
from instruments.tensor_dump.index import Placement


@dataclass(frozen=True, eq=False)
class Watched:
    """A module that is watched."""

    name: str
    module: nn.Module
    layer_type: str  # linear, attention or experts
    layer: int | None  # of the decoder, from 0
    chunk: int = 0  # of the pipeline, where a process has several
    parameter: str = ""  # of the module, where that holds several layers

    def expected(self, config: DumpConfig) -> tuple[str, ...]:
        """The tensors it is to give."""
        return tuple(tensor for tensor in TENSORS[self.layer_type] if tensor in config.tensors)


def layer_of(name: str) -> int | None:
    """The first number in a module's name: model.layers.3.mlp.experts.5.up_proj is of layer 3."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


def select(found: Sequence[Watched], config: DumpConfig) -> list[Watched]:
    """Those that the patterns name and that have one of the tensors asked for.

    Raises:
        ConfigError: a pattern names none.
    """
    unmatched = [glob for glob in config.modules if not any(fnmatchcase(one.name, glob) for one in found)]
    if unmatched or not config.modules:
        raise _nothing_matched(unmatched, found)
    chosen = [one for one in found if any(fnmatchcase(one.name, glob) for glob in config.modules)]
    if not any(one.expected(config) for one in chosen):
        kinds = ", ".join(sorted({one.layer_type for one in chosen}))
        raise ConfigError(
            f"tensors={config.tensors}: the modules asked for have none of them",
            where=f"setting tensors; modules={config.modules} are {kinds}",
            do=f"tensors={[name for one in chosen[:1] for name in TENSORS[one.layer_type]]}",
        )
    return [one for one in chosen if one.expected(config)]


def _nothing_matched(unmatched: Sequence[str], found: Sequence[Watched]) -> ConfigError:
    kinds = sorted({one.name.rpartition(".")[2] for one in found})
    has = (
        f"they are called {', '.join(kinds)}" if kinds else "the model has no Linear layer and no attention known here"
    )
    example = f"modules=['*.{kinds[0]}']" if kinds else "dump a model of transformers or megatron-core"
    return ConfigError(
        f"no module matches {', '.join(unmatched) or 'an empty list'}; {has}", where="setting modules", do=example
    )


def unseen_weights(roots: Sequence[nn.Module], found: Sequence[Watched]) -> Iterator[str]:
    """Names of weight matrices that no layer known here holds: embeddings, foreign layers."""
    seen = {id(parameter) for one in found for parameter in one.module.parameters()}
    for root in roots:
        for name, parameter in root.named_parameters():
            if parameter.ndim >= 2 and id(parameter) not in seen:
                yield name


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


@dataclass(frozen=True)
class Part:
    """What a process holds of a tensor: its shape in all, where its own part begins, and which axis counts tokens."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    token_axis: int | None
    pieces: tuple[int, int] | None = None  # as `Placement` has it

    @classmethod
    def whole(cls, tensor: Tensor, token_axis: int | None) -> "Part":
        """All of it."""
        return cls(tuple(tensor.shape), (0,) * tensor.ndim, token_axis)

    @classmethod
    def of_axis(
        cls, tensor: Tensor, axis: int, index: int, parts: int, token_axis: int | None, pieces: int = 1
    ) -> "Part":
        """Part number `index` of `parts` equal ones along `axis`.

        With several pieces the axis holds so many things one after the other (gate and up), and a part has its share
        of each.
        """
        shape, offset = list(tensor.shape), [0] * tensor.ndim
        offset[axis], shape[axis] = index * shape[axis] // pieces, parts * shape[axis]
        return cls(tuple(shape), tuple(offset), token_axis, (axis, pieces) if pieces > 1 and parts > 1 else None)


def keep_tokens(tensor: Tensor, part: Part, config: DumpConfig) -> tuple[Tensor, Placement]:
    """The kept positions of a tensor, and their place among the kept positions of all parts.

    Positions are those of the whole sequence, also where a process holds a part of it.
    """
    axis = part.token_axis
    first, every, most = config.first_token, config.every_tokens, config.max_tokens
    if axis is None or (first, every, most) == (0, 1, None):
        return tensor, Placement(part.global_shape, part.offset, part.pieces)
    chosen = range(part.global_shape[axis])[first::every][:most]
    begin, end = part.offset[axis], part.offset[axis] + tensor.shape[axis]
    before, until = bisect_left(chosen, begin), bisect_left(chosen, end)
    mine = chosen[before:until]
    index = [slice(None)] * tensor.ndim
    index[axis] = slice(mine[0] - begin, mine[-1] - begin + 1, every) if mine else slice(0, 0)
    shape, offset = list(part.global_shape), list(part.offset)
    shape[axis], offset[axis] = len(chosen), before
    return tensor[tuple(index)], Placement(tuple(shape), tuple(offset), part.pieces, (first, every, len(chosen)))
