"""Mixtral: Llama's attention, one sliding window for all layers or none, no always-on neurons; Mistral 3's images."""

from collections.abc import Mapping
from typing import Any

from models.targets.base import LAYER, ConfigInput, MoETarget, rope_of

_SHARPER = "llama_4_scaling_beta"  # of Ministral 3: how much sharper its attention is after each original length


def _keys(given: ConfigInput) -> dict[str, Any]:
    beta = rope_of(given.decoder.config).get(_SHARPER)
    return {
        "intermediate_size": given.width,
        "num_local_experts": given.shape.experts,
        "sliding_window": given.dense.get("sliding_window") if given.decoder.windows == "all" else None,
        # Mixtral's class does not read it: see `as_ministral3`.
        **({_SHARPER: beta} if beta else {}),
    }


def as_ministral3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys by which llama.cpp's converter takes a carve of Ministral 3 as that model, with experts.

    It computes the attention of long texts as the dense model; as Mixtral it would also ignore yarn's mscale.
    """
    rope = rope_of(config)
    if not (beta := config.get(_SHARPER) or rope.get(_SHARPER)) or not rope.get("mscale_all_dim"):
        return {}
    named = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    whole = {**rope, "rope_theta": config.get("rope_theta"), _SHARPER: beta}
    return {**named, "rope_parameters": whole, "rope_scaling": whole}


TARGETS = (
    MoETarget(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        sources={"llama": 1, "exaone": 1, "ministral3": 1, "mistral": 1, "phi3": 1},
        wrappers={"mistral3": ("Mistral3ForConditionalGeneration", "mistral3")},
        config_keys=_keys,
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        needs_head=("SGLang",),
        runtime_note="llama.cpp gives this architecture no sliding window: where config.json has "
        "one, keep texts within it.",
        router=LAYER + "block_sparse_moe.gate.weight",
        experts=LAYER + "block_sparse_moe.experts.{expert}.{part}.weight",
        parts=("w1", "w3", "w2"),
        norm_key=False,
        llama_cpp_keys=as_ministral3,
        llama_cpp_ropes=("default", "linear", "yarn", "dynamic", "llama3"),
        sliding_window=True,
    ),
)
