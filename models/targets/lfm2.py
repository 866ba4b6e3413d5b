"""LFM2 with experts: sigmoid gates that are normalised, no always-on neurons, dense layers before all others."""

from models.targets.base import LAYER, MoETarget, several_chosen

TARGETS = (
    MoETarget(
        model_type="lfm2_moe",
        architecture="Lfm2MoeForCausalLM",
        sources={"lfm2": 1},
        carries=True,
        config_keys=lambda given: {
            "num_experts": given.shape.experts,
            "moe_intermediate_size": given.width,
            # Of the dense layers; the dense model may compute it from other keys.
            "intermediate_size": given.decoder.width,
            # The dense family has other spellings of these.
            "layer_types": given.dense["layer_types"],
            "tie_embedding": given.tied,
            "num_dense_layers": len(given.shape.dense_layers),
            "use_expert_bias": True,
            # llama.cpp ignores it, so the scale goes into the down projections.
            "routed_scaling_factor": 1.0,
        },
        transformers_4=False,
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        router=LAYER + "feed_forward.gate.weight",
        experts=LAYER + "feed_forward.experts.{expert}.{part}.weight",
        parts=("w1", "w3", "w2"),
        dense=LAYER + "feed_forward.{part}.weight",
        selection_bias=LAYER + "feed_forward.expert_bias",
        selection_bias_scale=0.25,  # as in glm4_moe.py
        ffn_modules=("feed_forward",),
        scoring="sigmoid",
        normalised=several_chosen,
        dense_layers="first",
    ),
)
