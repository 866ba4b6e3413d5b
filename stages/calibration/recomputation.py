"""Gradient checkpointing: activations computed again in the backward pass instead of kept."""

from transformers import PreTrainedModel

from models.placement import is_offloaded


def save_memory(dense: PreTrainedModel, *, asked: bool) -> None:
    """Recompute where it is asked for, and where weights do not stay on the device.

    The graph would keep every offloaded weight until the backward pass; recomputed, one layer's are there at a time.
    """
    if asked or is_offloaded(dense):
        # 8-bit layers keep their inputs alive under the other kind.
        enable_gradient_checkpointing(dense, reentrant=getattr(dense, "is_loaded_in_8bit", False))


def enable_gradient_checkpointing(dense: PreTrainedModel, *, reentrant: bool = False) -> None:
    """Recompute layers in the backward pass, without switching dropout on as `train()` would."""
    # Renamed within transformers 5.
    enable = getattr(dense, "activation_checkpointing_enable", None) or dense.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    for layer in dense.get_decoder().layers:
        layer.training = True
