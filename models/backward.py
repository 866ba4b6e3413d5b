"""Whether a forward pass is one of its own, or part of a backward pass."""

import torch


def in_backward() -> bool:
    """Whether this thread runs a backward pass, as it does while a checkpointed forward pass is run again."""
    return torch._C._current_graph_task_id() != -1
