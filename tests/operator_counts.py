"""Count what a GPU's host would do: operators that it starts, and waits for a result. Works without a GPU."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# They compute nothing: views, and memory without contents.
VIEWS = {
    *("view", "t", "transpose", "slice", "select", "unsqueeze", "squeeze", "expand", "detach", "detach_", "alias"),
    *("as_strided", "_unsafe_view", "permute", "split", "split_with_sizes", "unbind", "diagonal", "reshape", "unfold"),
    *("movedim", "narrow", "_reshape_alias", "lift_fresh", "is_same_size", "mT", "set_", "resize_"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}
# The host needs a number from the device, or a size that only the device knows.
WAITS = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "bincount"}


class Operators(TorchDispatchMode):
    """Names of the operators started in this block, and of the waits, without copies to the host (`tolist`, `cpu`)."""

    def __init__(self) -> None:
        super().__init__()
        self.started: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name in WAITS:
            self.waits[name] += 1
        elif name not in VIEWS:
            self.started[name] += 1
        if name in {"index", "index_put_"} and any(each is not None and each.dtype == torch.bool for each in args[1]):
            self.waits[name] += 1
        return function(*args, **kwargs or {})


def count_operators(compute: Any, *arguments: Any, **settings: Any) -> Operators:
    """The operators and waits of one call."""
    with Operators() as found:
        compute(*arguments, **settings)
    return found
