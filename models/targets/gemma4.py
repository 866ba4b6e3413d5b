"""Gemma 4 with its own block of experts, which it normalises apart from the always-on neurons.

An RMSNorm is linear where its input is small against √eps. So both branches are made that small, and the weights of
their norms are the inverse: the sum of the branches is the dense FFN's output, whose own norm follows.
"""

from collections.abc import Mapping

from models.config import MoEShape
from models.decoder import Decoder
from models.targets.base import LAYER, Constant, MoETarget

# FFN outputs up to 1e4 stay below 1 % of √eps = 1e-3: the error is below (1e-2)² / 2.
_SMALL = 2.0**-30


def _constants(dense: Decoder, shape: MoEShape) -> Mapping[str, Constant]:
    inverse = float(dense.config["rms_norm_eps"]) ** 0.5 / _SMALL
    size, norm = (dense.hidden,), LAYER + "pre_feedforward_layernorm.weight"
    return {
        LAYER + "pre_feedforward_layernorm_2.weight": Constant(size, 1.0, norm),
        LAYER + "post_feedforward_layernorm_1.weight": Constant(size, inverse),
        LAYER + "post_feedforward_layernorm_2.weight": Constant(size, inverse),
        # The router normalises for itself and divides by √D: with this factor it reads what the FFN reads.
        LAYER + "router.scale": Constant(size, dense.hidden**0.5, norm),
        LAYER + "router.per_expert_scale": Constant((shape.experts,), _SMALL * shape.top_k),
    }


TARGETS = (
    MoETarget(
        model_type="gemma4_text",
        architecture="Gemma4ForCausalLM",
        sources={"gemma4_text": 1},
        carries=True,
        wrappers={"gemma4": ("Gemma4ForConditionalGeneration", "gemma4")},
        config_keys=lambda given: {
            "enable_moe_block": True,
            "num_experts": given.shape.experts,
            "top_k_experts": given.shape.top_k,
            "moe_intermediate_size": given.width,
            "intermediate_size": given.shared,
        },
        runtimes=("vLLM", "llama.cpp"),
        transformers_4=False,
        runtime_note="float16 loses the always-on neurons, whose down projections are below 1e-9. So do llama.cpp's "
        "F16 and Q8_0: use bfloat16 there, or carve with always_on=0.",
        activation="gelu_pytorch_tanh",
        router=LAYER + "router.proj.weight",
        packed=(LAYER + "experts.gate_up_proj", LAYER + "experts.down_proj"),
        shared=LAYER + "mlp.{part}.weight",
        more=_constants,
        router_module="router.proj",
        # The FFN's own output is added, which is too small to count.
        ffn_modules=("mlp", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
        # An optimizer's step is larger than these numbers.
        fixed=("mlp.down_proj.weight", "router.scale", "router.per_expert_scale"),
        always_has_shared=True,
        norm_key=False,
        factor_tensor=True,
        output_scale=_SMALL,
    ),
)
