"""Which modules of a model are watched."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from models.dump.config import TENSORS, DumpConfig
from models.errors import ConfigError


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
