"""TinyONN, the project's own class: any dense family's decoder, unchanged, with experts that all layers may share."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models import tiny_onn
from models.targets.base import LAYER, ConfigInput, MoETarget, activation_of, several_chosen

# Keys about the dense checkpoint's files, not about the model or a part of it.
_NOT_CARRIED = frozenset({"_name_or_path", "auto_map", "dtype", "quantization_config", "torch_dtype"})
# Class of transformers → where `trust_remote_code` finds it in the checkpoint.
AUTO_CLASSES = {
    "AutoConfig": "configuration_tiny_onn.TinyONNConfig",
    "AutoModel": "modeling_tiny_onn.TinyONNModel",
    "AutoModelForImageTextToText": "modeling_tiny_onn.TinyONNForCausalLM",
    "AutoModelForCausalLM": "modeling_tiny_onn.TinyONNForCausalLM",
}


def _config_keys(given: ConfigInput) -> dict[str, Any]:
    source, gate_scale, tied = given.decoder.config_json, given.gate_scale, given.tied
    plan = given.decoder.ffn
    # vLLM needs the AutoModel entry; without it vLLM refuses the model, as it should for activations that it would
    # compute wrongly. A pool has no entry either: transformers 4 would load its decoder without the shared experts.
    plain = not given.shape.pooled and activation_of(given.dense) == "silu"
    named = {"AutoModel": plain, "AutoModelForImageTextToText": given.decoder.is_wrapper}
    return {
        "architectures": ["TinyONNForCausalLM"],
        "model_type": "tiny_onn",
        "auto_map": {name: place for name, place in AUTO_CLASSES.items() if named.get(name, True)},
        "num_experts": given.shape.experts,
        "num_experts_per_tok": given.shape.top_k,
        "moe_intermediate_size": given.width,
        "shared_intermediate_size": given.shared,
        "routed_scaling_factor": gate_scale.routed_scaling_factor,
        "norm_topk_prob": gate_scale.norm_topk_prob,
        "topology": given.shape.topology,
        "dense_layers": [*given.shape.dense_layers],
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "tie_word_embeddings": tied,
        "dense_class": given.decoder.model_class,
        "ffn": {"layers": given.decoder.layers, "module": plan.path, "activation": plan.act},
        "torch_dtype": given.dtype,
        "dtype": given.dtype,
        **{key: source[key] for key in ("transformers_version",) if key in source},
        **{key: given.dense[key] for key in ("vocab_size",) if key in given.dense},
        **given.decoder.token_ids,  # generate() looks for them here if there is no generation_config.json
        # Configuration of the decoder.
        "dense": _legacy_rope(_carried(source) | {"tie_word_embeddings": tied}),
    }


def _carried(part: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in part.items() if key not in _NOT_CARRIED}
    return {key: _carried(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


_TOP_LEVEL_ROPE_KEYS = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def _legacy_rope(dense: Mapping[str, Any]) -> dict[str, Any]:
    """Spell Phi-3's position encoding as its hub checkpoints do, which transformers 4 and 5 read.

    transformers 4 accepts no other keys in rope_scaling, and does not read partial_rotary_factor there.
    """
    stored = dense.get("rope_parameters")
    if dense.get("model_type") != "phi3" or not stored:
        return dict(dense)
    rest = {key: value for key, value in dense.items() if key != "rope_parameters"}
    apart = {key: stored[key] for key in _TOP_LEVEL_ROPE_KEYS if key in stored}
    if stored.get("rope_type") != "longrope":
        return rest | apart | {"rope_scaling": None}
    factors = {key: stored[key] for key in ("short_factor", "long_factor")}
    return rest | apart | {"rope_scaling": {"type": "longrope", **factors}}


CODE_FILES = ("configuration_tiny_onn.py", "modeling_tiny_onn.py", "sparse_ffn.py")


def copy_code(folder: Path) -> None:
    """Copy the modules that `auto_map` in config.json names into a checkpoint's folder."""
    (package,) = tiny_onn.__path__
    for name in CODE_FILES:
        shutil.copyfile(Path(package) / name, folder / name)


TARGETS = (
    MoETarget(
        model_type="tiny_onn",
        architecture="TinyONNForCausalLM",
        sources={},  # any dense decoder
        config_keys=_config_keys,
        packed=(LAYER + "mlp.experts.gate_up_proj", LAYER + "mlp.experts.down_proj"),
        packed_pool=("experts.gate_up_proj", "experts.down_proj"),
        shared=LAYER + "mlp.shared_experts.{part}.weight",
        expert_modules=("experts", "shared_experts"),
        selection_bias=LAYER + "mlp.gate.e_score_correction_bias",
        dense_layers="any",
        scoring="sigmoid",  # for logits of a size that suits training, sigmoid gates differ least between experts
        normalised=several_chosen,
        factor_key=True,
        runtimes=("vLLM",),
        is_tiny_onn=True,
    ),
)
