"""config.json of a TinyONN checkpoint."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# About the dense checkpoint's files, not about the model.
_NOT_CARRIED = frozenset({"_name_or_path", "auto_map", "dtype", "quantization_config", "torch_dtype"})


def tiny_onn_keys(
    source: Mapping[str, Any],
    *,
    experts: int,
    top_k: int,
    expert_width: int,
    shared_width: int,
    routed_scaling_factor: float,
    norm_topk_prob: bool,
    scoring: str = "softmax",
    dtype: str,
    topology: str = "per_layer",
) -> dict[str, Any]:
    """All of config.json.

    Args:
        source: config.json of the dense checkpoint, of either transformers generation.
        experts: E.
        top_k: K.
        expert_width: N as it is on disk.
        shared_width: S as it is on disk; 0: no shared FFN is there.
        routed_scaling_factor: gates are multiplied by it. With equal logits they are 1/K, or, where they are not
            renormalised, 1/E as a softmax and 1/2 as a sigmoid; this is its inverse.
        norm_topk_prob: the K chosen gates sum to 1 before they are multiplied.
        scoring: gates are the softmax or the sigmoid of the router's logits.
        dtype: float32, bfloat16 or float16.
        topology: per_layer or global_pool.
    """
    dense = {key: value for key, value in source.items() if key not in _NOT_CARRIED}
    kept = ("transformers_version",) if "transformers_version" in source else ()
    return {
        "architectures": ["TinyONNForCausalLM"],
        "model_type": "tiny_onn",
        "auto_map": {
            "AutoConfig": "configuration_tiny_onn.TinyONNConfig",
            "AutoModelForCausalLM": "modeling_tiny_onn.TinyONNForCausalLM",
        },
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": expert_width,
        "shared_intermediate_size": shared_width,
        "routed_scaling_factor": routed_scaling_factor,
        "norm_topk_prob": norm_topk_prob,
        "scoring": scoring,
        "topology": topology,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
        **{key: source[key] for key in kept},
        "dense": dense | {"tie_word_embeddings": False},
    }


CODE_FILES = ("configuration_tiny_onn.py", "modeling_tiny_onn.py", "sparse_ffn.py", "load_balance.py")


def copy_code(folder: Path) -> None:
    """Copy what `auto_map` in config.json names into a checkpoint's folder."""
    for name in CODE_FILES:
        shutil.copyfile(Path(__file__).with_name(name), folder / name)
