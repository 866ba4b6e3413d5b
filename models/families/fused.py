"""Names of projections that some families store several in one tensor, rows below rows."""

# Part → the fused tensor's name; of gate and up each has half the rows, of q, k and v the heads say.
_FUSED = {
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
    "self_attn.q_proj": "self_attn.qkv_proj",
    "self_attn.k_proj": "self_attn.qkv_proj",
    "self_attn.v_proj": "self_attn.qkv_proj",
}


def fused_name(name: str) -> str:
    """The tensor that holds this one where projections are fused; its own name where that is none of them."""
    for part, whole in _FUSED.items():
        if f".{part}." in name:
            return name.replace(part, whole)
    return name
