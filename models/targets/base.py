"""MoE targets: weight names, and what each can say."""

from dataclasses import dataclass
from enum import StrEnum

from models.dense import DENSE_FAMILIES

_LAYER = "model.layers.{layer}."


class AlwaysOn(StrEnum):
    """Where a target keeps neurons that every token passes."""

    NONE = "none"
    SIGMOID_GATED = "sigmoid_gated"  # shared expert behind a gate σ(g·x)
    UNGATED = "ungated"


@dataclass(frozen=True)
class MoETarget:
    """One MoE architecture. Names hold `{layer}`, `{expert}` and `{part}`."""

    model_type: str
    architecture: str
    sources: frozenset[str]  # dense families whose attention it can express
    always_on: AlwaysOn
    experts: str = _LAYER + "mlp.experts.{expert}.{part}.weight"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    # Where all experts of a layer are one tensor: (E, 2N, D) with gate above up, and (E, D, N).
    packed: tuple[str, str] | None = None
    # The same, where one pool of experts is shared by all layers.
    packed_pool: tuple[str, str] | None = None
    router: str = _LAYER + "mlp.gate.weight"
    shared: str | None = None
    packed_shared: tuple[str, str] | None = None  # (2S, D) and (D, S)
    shared_router: str | None = None
    selection_bias: str | None = None
    output_bias: bool = False  # attention's o_proj may have a bias
    sliding_window: bool = False
    least_experts: int = 1
    head_dim: bool = True  # heads may be wider or narrower than hidden_size / heads
    # The project's own class: the source's decoder as it is, with its own weight names and tied or untied head.
    own: bool = False

    def ffn(self, layer: int, expert: int) -> tuple[str, str, str]:
        """Names of an expert's gate, up and down."""
        gate, up, down = (self.experts.format(layer=layer, expert=expert, part=part) for part in self.parts)
        return gate, up, down

    def shared_ffn(self, layer: int) -> tuple[str, str, str]:
        """Names of the shared expert's gate, up and down."""
        assert self.shared is not None, f"{self.model_type} has no shared expert"
        gate, up, down = (self.shared.format(layer=layer, part=part) for part in self.parts)
        return gate, up, down


_LLAMA_LIKE = frozenset({"llama", "mistral", "phi3"})
_GRANITE_PACKED = (_LAYER + "block_sparse_moe.input_linear.weight", _LAYER + "block_sparse_moe.output_linear.weight")

MOE_TARGETS = {
    target.model_type: target
    for target in (
        MoETarget("qwen3_moe", "Qwen3MoeForCausalLM", frozenset({"qwen3"}), AlwaysOn.NONE, output_bias=True),
        MoETarget(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            _LLAMA_LIKE | {"qwen2"},
            AlwaysOn.SIGMOID_GATED,
            shared=_LAYER + "mlp.shared_expert.{part}.weight",
            shared_router=_LAYER + "mlp.shared_expert_gate.weight",
            head_dim=False,  # of transformers 4
        ),
        MoETarget(
            "mixtral",
            "MixtralForCausalLM",
            _LLAMA_LIKE,
            AlwaysOn.NONE,
            experts=_LAYER + "block_sparse_moe.experts.{expert}.{part}.weight",
            parts=("w1", "w3", "w2"),
            router=_LAYER + "block_sparse_moe.gate.weight",
            sliding_window=True,
        ),
        MoETarget(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            _LLAMA_LIKE | {"qwen3", "qwen2"},
            AlwaysOn.UNGATED,
            shared=_LAYER + "mlp.shared_experts.{part}.weight",
            selection_bias=_LAYER + "mlp.gate.e_score_correction_bias",
            least_experts=2,
        ),
        MoETarget("flex_olmo", "FlexOlmoForCausalLM", frozenset({"olmo2"}), AlwaysOn.NONE, output_bias=True),
        MoETarget(
            "granitemoe",
            "GraniteMoeForCausalLM",
            frozenset({"granite"}),
            AlwaysOn.NONE,
            packed=_GRANITE_PACKED,
            router=_LAYER + "block_sparse_moe.router.layer.weight",
            output_bias=True,
            head_dim=False,
        ),
        MoETarget(
            "granitemoeshared",
            "GraniteMoeSharedForCausalLM",
            frozenset({"granite"}),
            AlwaysOn.UNGATED,
            packed=_GRANITE_PACKED,
            router=_LAYER + "block_sparse_moe.router.layer.weight",
            packed_shared=(_LAYER + "shared_mlp.input_linear.weight", _LAYER + "shared_mlp.output_linear.weight"),
            output_bias=True,
            head_dim=False,
        ),
        MoETarget(
            "tiny_onn",
            "TinyONNForCausalLM",
            frozenset(DENSE_FAMILIES),
            AlwaysOn.UNGATED,
            packed=(_LAYER + "mlp.experts.gate_up_proj", _LAYER + "mlp.experts.down_proj"),
            packed_pool=("experts.gate_up_proj", "experts.down_proj"),
            shared=_LAYER + "mlp.shared_experts.{part}.weight",
            selection_bias=_LAYER + "mlp.gate.e_score_correction_bias",
            output_bias=True,
            sliding_window=True,
            own=True,
        ),
    )
}
