"""A loss that is no number: where it began."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.errors import NumericsError


def explain_not_finite(model: nn.Module, inputs: Mapping[str, Tensor], step: int, folder: Path) -> NumericsError:
    """The error for a step whose gradients are not finite; it is not applied.

    Args:
        model: as it was before the step, with the gradients.
        inputs: the last micro-batch.
        step: its number.
        folder: of the checkpoints.
    """
    place = first_bad_output(model, inputs)
    if place is None:
        bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        # Backwards, the last layer comes first.
        place = f"gradient of {bad[-1]}" if bad else "gradients of another process, or their sum"
    else:
        place = f"output of {place}"
    kept = sorted(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    return NumericsError(
        f"training step {step} gave no finite gradient and was not applied",
        where=f"first seen in the {place}; last good checkpoint: {kept[-1] if kept else 'that before training'}",
        do="lower train.router_rate= and train.expert_rate=, or raise train.warmup_share=",
    )


@torch.no_grad()
def first_bad_output(model: nn.Module, inputs: Mapping[str, Tensor]) -> str | None:
    """The first module, in the order of computation, that makes what is not finite; None where all outputs are."""
    found: list[str] = []

    def look(name: str, output: Any) -> None:  # noqa: ANN401 - whatever a module returns
        tensor = output[0] if isinstance(output, tuple) else output
        if not found and isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
            found.append(name)

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: look(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None
