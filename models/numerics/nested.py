"""Tensors inside whatever a module takes and returns."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only


def find_tensors(value: Any) -> dict[str, Tensor]:  # noqa: ANN401 - whatever a module returns
    """The tensors in it by path, such as "[0]" or ".logits"; of a tensor alone, ""."""
    found, _ = tree_flatten_with_path(value)
    return {keystr(path): leaf for path, leaf in found if isinstance(leaf, Tensor)}


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:  # noqa: ANN401 - the same kind of thing
    """The same with every tensor changed."""
    return tree_map_only(Tensor, change, value)
