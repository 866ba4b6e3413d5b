"""Mixtral: Llama's attention, one sliding window for all layers or none, no always-on neurons; Mistral 3's images."""

from models.targets.base import LAYER, MoETarget

TARGETS = (
    MoETarget(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        sources={"llama": 1, "ministral3": 1, "mistral": 1, "phi3": 1},
        wrappers={"mistral3": ("Mistral3ForConditionalGeneration", "mistral3")},
        config_keys=lambda given: {
            "intermediate_size": given.width,
            "num_local_experts": given.shape.experts,
            "sliding_window": given.dense.get("sliding_window") if given.decoder.windows == "all" else None,
        },
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        runtime_note="llama.cpp gives this architecture no sliding window: where config.json has "
        "one, keep texts within it.",
        router=LAYER + "block_sparse_moe.gate.weight",
        experts=LAYER + "block_sparse_moe.experts.{expert}.{part}.weight",
        parts=("w1", "w3", "w2"),
        norm_key=False,
        llama_cpp_ropes=("default", "linear", "yarn", "dynamic", "llama3"),
        sliding_window=True,
    ),
)
