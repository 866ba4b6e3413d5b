"""The tensors in arguments and outputs of modules: find, change and copy them."""

import copy
from collections import defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch.distributed.tensor import DTensor

# Positional and keyword arguments of a module.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor; avoids importing its module, which takes half a second."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def version_of(tensor: Tensor) -> int | None:
    """The number of changes in place; None in inference mode, which does not count them."""
    return None if tensor.is_inference() else tensor._version


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs along one more axis; others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def find_tensors(value: Any) -> dict[str, Tensor]:  # noqa: ANN401 - any output of a module
    """Tensors in a value by path, such as "[0]" or ".logits"; the path of a bare tensor is ""."""
    if isinstance(value, Tensor):
        return {"": value}
    found: dict[str, Tensor] = {}
    for path, leaf in tree_flatten_with_path(value)[0]:
        if isinstance(leaf, Tensor):
            found[keystr(path)] = leaf
        else:
            for name, part in _parts_of(leaf):
                found |= {f"{keystr(path)}{name}{rest}": tensor for rest, tensor in find_tensors(part).items()}
    return found


def find_real_tensors(value: Any) -> dict[str, Tensor]:  # noqa: ANN401 - any output of a module
    """`find_tensors`, with complex ones as pairs of real numbers."""
    return {path: as_real(tensor) for path, tensor in find_tensors(value).items()}


def _parts_of(leaf: object) -> list[tuple[str, Any]]:
    """Path and value of each part of a dataclass or mapping; pytree treats both as leaves, except dict itself."""
    if isinstance(leaf, MutableMapping):
        return [(f"[{key!r}]", part) for key, part in leaf.items()]
    return [(f".{one.name}", getattr(leaf, one.name)) for one in fields(leaf)] if _is_record(leaf) else []


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:  # noqa: ANN401 - the same structure
    """Apply `change` to every tensor in a value, in the order of `find_tensors`."""

    def change_leaf(leaf: Any) -> Any:  # noqa: ANN401
        if isinstance(leaf, Tensor):
            return change(leaf)
        if isinstance(leaf, MutableMapping):
            filled = copy.copy(leaf)
            for key, part in leaf.items():
                filled[key] = map_tensors(change, part)
            return filled
        if not _is_record(leaf):
            return leaf
        changed = copy.copy(leaf)
        for one in fields(leaf):
            object.__setattr__(changed, one.name, map_tensors(change, getattr(leaf, one.name)))  # it may be frozen
        return changed

    return tree_map(change_leaf, value)


def copy_arguments(arguments: Arguments) -> Arguments:
    """Clone tensors, deep-copy caches and other plain objects: a module may write into its arguments."""
    return cast("Arguments", tree_map(_copy_leaf, map_tensors(Tensor.clone, arguments)))


def _copy_leaf(leaf: Any) -> Any:  # noqa: ANN401
    if isinstance(leaf, Tensor | nn.Module | type) or callable(leaf) or not hasattr(leaf, "__dict__"):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except TypeError:  # a lock or a file cannot be copied
        return leaf


def _is_record(leaf: object) -> "TypeGuard[DataclassInstance]":
    """Whether it is a dataclass instance, which pytree treats as a leaf."""
    return is_dataclass(leaf) and not isinstance(leaf, type)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the CPU in their own number formats, with one transfer per device."""
    places: dict[torch.device, list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        places[tensor.device].append(place)
    found = list(tensors)
    for group in places.values():
        moved = torch.cat([tensors[place].detach().contiguous().view(-1).view(torch.uint8) for place in group]).cpu()
        sizes = [tensors[place].numel() * tensors[place].element_size() for place in group]
        for place, data in zip(group, moved.split(sizes), strict=True):
            # Cloned for the alignment that the number format needs.
            found[place] = data.clone().view(tensors[place].dtype).view(tensors[place].shape)
    return found
