"""MoE targets: weight names, what each can say, and which one a carve becomes."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from models.errors import ConfigError
from models.families.dense import DENSE_FAMILIES
from models.shape import Shape

_LAYER = "model.layers.{layer}."


class AlwaysOn(StrEnum):
    """Where a target keeps units that every token passes."""

    NONE = "none"
    SIGMOID_GATED = "sigmoid_gated"  # shared expert behind a gate σ(g·x)
    UNGATED = "ungated"


@dataclass(frozen=True)
class MoETarget:
    """One MoE architecture of transformers. Names hold `{layer}`, `{expert}` and `{part}`."""

    model_type: str
    architecture: str
    sources: frozenset[str]  # dense families whose attention it can express
    always_on: AlwaysOn
    experts: str = _LAYER + "mlp.experts.{expert}.{part}.weight"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = _LAYER + "mlp.gate.weight"
    shared: str | None = None
    shared_router: str | None = None
    selection_bias: str | None = None
    output_bias: bool = False  # attention's o_proj may have a bias
    sliding_window: bool = False

    def ffn(self, layer: int, expert: int) -> tuple[str, str, str]:
        """Names of an expert's gate, up and down."""
        gate, up, down = (self.experts.format(layer=layer, expert=expert, part=part) for part in self.parts)
        return gate, up, down

    def shared_ffn(self, layer: int) -> tuple[str, str, str]:
        """Names of the shared expert's gate, up and down."""
        assert self.shared is not None, f"{self.model_type} has no shared expert"
        gate, up, down = (self.shared.format(layer=layer, part=part) for part in self.parts)
        return gate, up, down


MOE_TARGETS = {
    target.model_type: target
    for target in (
        MoETarget("qwen3_moe", "Qwen3MoeForCausalLM", frozenset({"qwen3"}), AlwaysOn.NONE, output_bias=True),
        MoETarget(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            frozenset({"qwen2", "llama", "mistral"}),
            AlwaysOn.SIGMOID_GATED,
            shared=_LAYER + "mlp.shared_expert.{part}.weight",
            shared_router=_LAYER + "mlp.shared_expert_gate.weight",
        ),
        MoETarget(
            "mixtral",
            "MixtralForCausalLM",
            frozenset({"llama", "mistral"}),
            AlwaysOn.NONE,
            experts=_LAYER + "block_sparse_moe.experts.{expert}.{part}.weight",
            parts=("w1", "w3", "w2"),
            router=_LAYER + "block_sparse_moe.gate.weight",
            sliding_window=True,
        ),
        MoETarget(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            frozenset({"qwen3", "qwen2", "llama", "mistral"}),
            AlwaysOn.UNGATED,
            shared=_LAYER + "mlp.shared_experts.{part}.weight",
            selection_bias=_LAYER + "mlp.gate.e_score_correction_bias",
        ),
    )
}

# The target of the same family, where it can say the shape.
_OWN = {"qwen3": "qwen3_moe", "qwen2": "qwen2_moe", "llama": "mixtral", "mistral": "mixtral"}


def select_target(source_model_type: str, requested: str, always_on: int) -> MoETarget:
    """The architecture a carve becomes.

    Args:
        source_model_type: model_type of the dense checkpoint.
        requested: a name of MOE_TARGETS, or auto: the same family, or glm4_moe where that has no always-on units.
        always_on: S.
    Raises:
        ConfigError: unknown name, or a target that cannot say this source or always-on units.
    """
    if requested == "auto":
        own = MOE_TARGETS[_OWN[source_model_type]]
        return own if always_on == 0 or own.always_on is not AlwaysOn.NONE else MOE_TARGETS["glm4_moe"]
    if requested not in MOE_TARGETS:
        raise _refusal(f"unknown target {requested!r}", source_model_type, always_on)
    target = MOE_TARGETS[requested]
    if source_model_type not in target.sources:
        raise _refusal(f"{requested} cannot hold the attention of {source_model_type}", source_model_type, always_on)
    if always_on and target.always_on is AlwaysOn.NONE:
        raise _refusal(f"{requested} has no always-on units, {always_on} are wanted", source_model_type, always_on)
    return target


def _refusal(what: str, source_model_type: str, always_on: int) -> ConfigError:
    able = [
        target.model_type
        for target in MOE_TARGETS.values()
        if source_model_type in target.sources and not (always_on and target.always_on is AlwaysOn.NONE)
    ]
    return ConfigError(what, where="assemble.target", do=f"assemble.target=auto, or one of {', '.join(able)}")


def check_target(config: Mapping[str, Any], target: MoETarget, shape: Shape) -> list[ConfigError]:
    """What of this source and shape the target cannot say, beside what `select_target` refuses.

    Args:
        config: config.json of the dense checkpoint.
        target: the architecture to write.
        shape: E, N, K, S.
    """
    family = DENSE_FAMILIES[str(config["model_type"])]
    source = {**family.defaults, **config}
    name = target.model_type
    found = []
    if "o" in family.attention_biases(source) and not target.output_bias:
        do = "choose a source without attention biases"
        found.append((f"{name} has no bias on o_proj", "attention_bias in config.json", do))
    if family.model_type == "mistral" and source["sliding_window"] is not None and not target.sliding_window:
        do = "assemble.target=mixtral always_on=0"
        found.append((f"{name} has no sliding window", "sliding_window in config.json", do))
    if name == "qwen2_moe" and "head_dim" in source and source["head_dim"] != _derived_head_dim(source):
        # transformers 4 refuses it.
        found.append(
            (f"{name} cannot say head_dim={source['head_dim']}", "head_dim in config.json", "assemble.target=auto")
        )
    if target.selection_bias and shape.experts < 2:
        found.append((f"{name} needs at least 2 experts", f"experts={shape.experts}", "experts=2"))
    return [ConfigError(what, where=where, do=do) for what, where, do in found]


def _derived_head_dim(source: Mapping[str, Any]) -> int:
    return int(source["hidden_size"]) // int(source["num_attention_heads"])
