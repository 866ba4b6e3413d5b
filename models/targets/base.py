"""The description of one MoE architecture, and the rules that follow from it: gates, their scale, and padding.

At equal router logits an architecture's gates are equal and mostly below 1, but the dense FFN weighs every neuron by 1.
So their inverse goes into config.json if the architecture has a factor there, else into the down projections.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from models.config import GLOBAL_POOL, MoEShape
from models.decoder import Decoder

if TYPE_CHECKING:
    from torch import Tensor

LAYER = "model.layers.{layer}."

RUNTIMES = ("vLLM", "SGLang", "llama.cpp")  # for serving

# Grouped matrix kernels need rows of 16 bytes, 8 half-precision numbers. llama.cpp quantises in blocks of 32 (tensors
# of other widths stay in 16 bits and are slow), and vLLM on a CPU needs 32, too. Fused kernels of serving runtimes are
# fastest from 128 on, llama.cpp's K-quants need 256.
ALIGNMENT, BLOCK = 8, 32
_NO_TIES = "reads the output embedding only from a tensor of its own (`assemble.tied_embeddings=false` writes it)"
# Zero neurons cost bytes and time: at most this share of the width is added to fill whole blocks.
MOST_PADDING = 1 / 8


@dataclass(frozen=True)
class GateScale:
    """Scales applied in fp32 when a checkpoint is written; powers of two change no mantissa."""

    down_scale: float  # routed experts' down
    shared_down_scale: float  # always-on neurons' down
    norm_topk_prob: bool | None  # None: the architecture has no such key
    routed_scaling_factor: float | None  # None: the architecture has no such key


@dataclass(frozen=True)
class ConfigInput:
    """Input of a target's `config_keys`."""

    decoder: Decoder
    # Its `config`, with the position encoding in the spellings of transformers 4 and 5.
    dense: Mapping[str, Any]
    tied: bool  # input and output embedding are one tensor
    shape: MoEShape
    width: int  # of an expert on disk
    shared: int  # neurons of the always-on FFN on disk
    gate_scale: GateScale
    dtype: str


@dataclass(frozen=True)
class Constant:
    """A further tensor of a carved layer: full of `value`, or `value` times a tensor that is copied."""

    shape: tuple[int, ...]
    value: float
    of: str | None = None  # name of the copied tensor, as a target names tensors


def copied(dense: Decoder, name: str, tensor: "Tensor") -> dict[str, "Tensor"]:
    """The tensor under its own name; q, k and v apart where the dense model has one matrix for them."""
    if not name.endswith("self_attn.qkv_proj.weight"):
        return {name: tensor}
    config = dense.config
    rows = int(config.get("head_dim") or dense.hidden // config["num_attention_heads"])
    queries, keys = (rows * int(config[key]) for key in ("num_attention_heads", "num_key_value_heads"))
    parts = tensor[:queries], tensor[queries:-keys], tensor[-keys:]
    return {name.replace("qkv_proj", f"{letter}_proj"): part for letter, part in zip("qkv", parts, strict=True)}


@dataclass(frozen=True)
class MoETarget:
    """One MoE architecture. Names of tensors contain `{layer}`, `{expert}` and `{part}`."""

    model_type: str
    architecture: str
    # Model types of dense decoders that it can express → rank among their targets; `auto` takes the lowest that fits.
    sources: Mapping[str, int]
    # Its keys of config.json in addition to those of all architectures; for TinyONN, all keys.
    config_keys: Callable[[ConfigInput], dict[str, Any]]
    # Its config.json has the keys of the dense one, as far as `config_keys` does not say otherwise; else those that all
    # architectures share.
    carries: bool = False
    # Model type of a dense wrapper, whose text decoder is carved → architecture and model type of the MoE's wrapper.
    wrappers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    transformers_4: bool = True  # transformers 4.57 loads it, too
    runtimes: tuple[str, ...] = ()  # serving runtimes that know the architecture by name
    runtime_note: str = ""  # one more line of the model card
    # Runtimes that read its output embedding only from a tensor of its own; `pipeline gguf` writes that for llama.cpp.
    needs_head: tuple[str, ...] = ()
    activation: str = "silu"  # of the experts in serving runtimes
    # Position encodings that llama.cpp has for it, by their names in transformers; it silently ignores others. Dynamic
    # ones differ from the default only in texts longer than max_position_embeddings.
    llama_cpp_ropes: tuple[str, ...] = ("default", "linear", "yarn", "dynamic")
    llama_cpp_output_bias: bool = False  # llama.cpp has a bias on o_proj
    # Keys of config.json by which its converter takes a carve as another architecture, which computes more.
    llama_cpp_keys: Callable[[Mapping[str, Any]], dict[str, Any]] = field(default=lambda _config: {})
    llama_cpp_windows: bool = False  # llama.cpp has its sliding windows
    # Runtimes → what else they do not compute, and do not refuse, of a model with this config.json.
    lacks: Callable[[Mapping[str, Any]], Mapping[str, str]] = field(default=lambda _config: {})

    router: str = LAYER + "mlp.gate.weight"
    experts: str = LAYER + "mlp.experts.{expert}.{part}.weight"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    packed: tuple[str, str] | None = None  # all experts of a layer: (E, 2N, D) with gate above up, and (E, D, N)
    transposed: bool = False  # on disk they are (E, D, 2N) and (E, N, D), which transformers sees by their shape alone
    packed_pool: tuple[str, str] | None = None  # the same for one pool of experts that all layers share
    shared: str | None = None  # the FFN of the always-on neurons
    packed_shared: tuple[str, str] | None = None  # the same as (2S, D) and (D, S)
    shared_router: str | None = None  # row g of its gate σ(g·x)
    selection_bias: str | None = None
    # Further tensors of a carved layer, which the dense one does not have.
    more: Callable[[Decoder, MoEShape], Mapping[str, Constant]] = field(default=lambda _dense, _shape: {})

    # Why it cannot hold a decoder of its `sources`; for those whose keys it carries, in place of the checks below.
    refuses: Callable[[Decoder], str] = field(default=lambda _dense: "")
    # What becomes of a tensor outside of the FFNs: names in the MoE → tensors.
    copies: Callable[[Decoder, str, "Tensor"], Mapping[str, "Tensor"]] = field(default=copied)
    dense: str = LAYER + "mlp.{part}.weight"  # gate, up and down of a layer that stays dense, by `parts`

    # Modules in transformers' model, for training and for comparing FFNs with the dense ones.
    router_module: str = "gate"
    expert_modules: tuple[str, ...] = ("experts",)  # with shared experts and their gate
    ffn_modules: tuple[str, ...] = ("mlp",)  # of a layer; their outputs sum to its FFN's, the first reads its input
    fixed: tuple[str, ...] = ()  # parameters of a carved layer that training must not change

    scoring: str = "softmax"  # of router logits: softmax or sigmoid
    normalised: Callable[[MoEShape], bool] = field(default=lambda _shape: True)  # the K chosen gates sum to 1
    norm_key: bool = True  # config.json has norm_topk_prob
    factor_key: bool = False  # config.json has routed_scaling_factor, which takes the scale
    factor_tensor: bool = False  # a tensor of `more` takes the scale
    output_scale: float = 1.0  # factor on all down projections, which the architecture takes back
    selection_bias_scale: float = 1.0  # converts a bias on the logits to one where the architecture adds it
    least_experts: int = 1

    # Which layers may keep a dense FFN: none, the first ones, the first and last ones, or any.
    dense_layers: Literal["none", "first", "ends", "any"] = "none"
    always_has_shared: bool = False  # at least one always-on neuron
    shared_as_experts: bool = False  # always-on neurons come in multiples of an expert's width
    one_shared_expert: bool = False  # at most as many as an expert has

    output_bias: bool = False  # attention's o_proj may have a bias
    sliding_window: bool = False  # one window for all layers
    layer_windows: bool = False  # a window in some layers
    head_dim: bool = True  # heads may be wider or narrower than hidden_size / heads
    partial_rotation: bool = False  # part of each head may be rotated
    # TinyONN, the project's own class: the dense family's decoder, weight names, and tied or untied head.
    is_tiny_onn: bool = False

    def rank(self, dense: Decoder) -> int | None:
        """Its rank among the targets of a dense decoder; None: it cannot express this one."""
        if self.is_tiny_onn:
            return 9  # last: it needs trust_remote_code
        held = not dense.is_wrapper or dense.config_json.get("model_type") in self.wrappers
        return self.sources.get(dense.model_type) if held and not dense.narrow else None

    @property
    def has_shared(self) -> bool:
        """Whether it has an FFN for always-on neurons."""
        return bool(self.shared or self.packed_shared)

    def has_room(self, shape: MoEShape) -> bool:
        """Whether it can hold this many always-on neurons."""
        most = shape.n if self.one_shared_expert else math.inf
        return shape.always_on <= (most if self.has_shared else 0)

    def served_by(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The serving runtimes that compute a carve with this config.json correctly."""
        faults = self.faults(config)
        return tuple(runtime for runtime in self.runtimes if runtime not in faults)

    def faults(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Runtimes that know the architecture but do not compute a carve correctly → what they do not do.

        `config`: from `emit_text_config`; or, of a carve that is not TinyONN, the text part of its config.json.
        """
        if config.get("topology") == GLOBAL_POOL:
            return dict.fromkeys(self.runtimes, "runs no pool of experts that layers share")
        if (activation := activation_of(config)) != self.activation:
            # vLLM 0.32 computes some with SiLU and refuses others.
            known = "SiLU" if self.activation == "silu" else self.activation
            return dict.fromkeys(self.runtimes, f"has only {known} for these experts, not {activation}")
        faults, rope = dict[str, str](), rope_of(config)
        scaled = rope_type_of(config) == "yarn" and (rope.get("mscale_all_dim") or rope.get("attention_factor"))
        if scaled and not self.is_tiny_onn:  # which runs in vLLM by transformers' code
            wrong = [name for name in self.runtimes if name != "llama.cpp" or not self.llama_cpp_keys(config)]
            faults = dict.fromkeys(wrong, "ignores the mscale and attention_factor of yarn")
        if "llama.cpp" in {*self.runtimes} - faults.keys() and (fault := self._llama_cpp_fault(config)):
            faults["llama.cpp"] = fault
        heads = [name for name in self.needs_head if config.get("tie_word_embeddings") and name != "llama.cpp"]
        return {**dict.fromkeys(heads, _NO_TIES), **self.lacks(config), **faults}

    def _llama_cpp_fault(self, config: Mapping[str, Any]) -> str:
        if dense := config.get("mlp_only_layers"):
            return f"wants experts in every layer of this architecture, and layers {dense} have none"
        if (rope := rope_type_of(config)) not in self.llama_cpp_ropes:
            return f"has no {rope} position encoding for this architecture"
        if self.output_bias and config.get("attention_bias") and not self.llama_cpp_output_bias:
            return "has no bias on o_proj for this architecture"
        return ""

    def ffn(self, layer: int, expert: int) -> tuple[str, ...]:
        """Names of one expert's gate, up and down."""
        return tuple(self.experts.format(layer=layer, expert=expert, part=part) for part in self.parts)

    def shared_ffn(self, layer: int) -> tuple[str, ...]:
        """Names of the shared expert's gate, up and down."""
        assert self.shared is not None, f"{self.model_type} has no shared expert"
        return tuple(self.shared.format(layer=layer, part=part) for part in self.parts)


def activation_of(config: Mapping[str, Any]) -> str:
    """The FFN's activation function, by its name in transformers; of `Decoder.config`, or a carve's config.json."""
    return str(config.get("hidden_act") or config.get("hidden_activation") or "silu")


def rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The position encoding; as in transformers 5, the older key comes first where both are given."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    return rope if isinstance(rope, Mapping) else {}


def rope_type_of(config: Mapping[str, Any]) -> str:
    """The kind of position encoding, by its name in transformers."""
    kind = str(rope_of(config).get("rope_type") or rope_of(config).get("type") or "default")
    return "longrope" if kind == "su" else kind  # the name in early Phi-3 checkpoints


# Dense families that read partial_rotary_factor. Others rotate whole heads, even if config.json has it.
_PARTIAL = {"glm", "phi3", "qwen3_5_text"}


def rotated_share(config: Mapping[str, Any]) -> float:
    """The share of each head that the position encoding rotates."""
    if config.get("model_type") not in _PARTIAL:
        return 1.0
    return float(rope_of(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1)


def long_texts(target: MoETarget, config: Mapping[str, Any]) -> str:
    """What a carve computes otherwise than the dense model of this `Decoder.config` in long texts; empty: nothing."""
    rope = rope_of(config)
    if target.is_tiny_onn or target.carries:
        return ""
    first = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or 4096
    if rope.get("llama_4_scaling_beta"):
        return (
            f"The dense model's attention is sharper after each {first:,} tokens, which {target.model_type} does not "
            "have: longer texts are computed otherwise. `assemble.target=tiny_onn` computes them as the dense model."
        )
    if config.get("model_type") == "phi3" and rope_type_of(config) == "longrope":
        # Phi-3's class computes its cache again where texts become long and keys are rotated otherwise.
        return (
            f"transformers: generation that begins within {first:,} tokens and goes beyond is wrong from there on, "
            "unless `use_cache=False`: the cache keeps keys in the position encoding of short texts. "
            "`assemble.target=tiny_onn` computes them again, as the dense model does."
        )
    return ""


def several_chosen(shape: MoEShape) -> bool:
    """Renormalise gates only if K > 1: one renormalised gate is always 1 and gives its router no gradient."""
    return shape.top_k > 1


def gate_scale_of(target: MoETarget, shape: MoEShape) -> GateScale:
    """The scales with which, at equal router logits, every chosen expert and the always-on neurons have weight 1.

    Numerics: exact in every number format if `down_scale` is a power of two; else scaled in fp32 and rounded once.
    """
    normalised = target.normalised(shape)
    unscaled = shape.experts if target.scoring == "softmax" else 2  # 1/E, or σ(0) = ½
    inverse = float(shape.top_k if normalised else unscaled)
    return GateScale(
        down_scale=1.0 if target.factor_key or target.factor_tensor else inverse * target.output_scale,
        shared_down_scale=target.output_scale * (2.0 if target.shared_router else 1.0),  # σ(0) = ½
        norm_topk_prob=normalised if target.norm_key else None,
        routed_scaling_factor=inverse if target.factor_key else None,
    )


def gate_kind(target: MoETarget, shape: MoEShape) -> str:
    """How the target turns logits into gates: a value of `models.routing.GateKind`, whose import would load torch."""
    if target.normalised(shape):
        return f"{target.scoring}_of_chosen"
    return "sigmoid" if target.scoring == "sigmoid" else "softmax_of_all"


def is_power_of_two(number: float) -> bool:
    """1, 2, 4, 8 ..."""
    return number >= 1 and math.frexp(number)[0] == 0.5


def expert_width(shape: MoEShape, pad_to: int | None = None) -> int:
    """Neurons of an expert on disk: N rounded up to a multiple of `pad_to`; None: 32 if that adds <= 1/8, or 8."""
    return _padded(shape.n, pad_to)


def shared_width(target: MoETarget, shape: MoEShape, pad_to: int | None = None) -> int:
    """Neurons of the always-on FFN on disk; 0 if the architecture has none, or there are none and it may be absent."""
    if not target.has_shared:
        return 0
    neurons = max(1, shape.always_on) if target.always_has_shared else shape.always_on
    if target.shared_as_experts:
        return _round_up(neurons, expert_width(shape, pad_to))
    return _padded(neurons, pad_to)


def _padded(width: int, pad_to: int | None) -> int:
    if pad_to is None:
        blocks = _round_up(width, BLOCK)
        return blocks if blocks - width <= MOST_PADDING * width else _round_up(width, ALIGNMENT)
    return _round_up(width, pad_to)


def _round_up(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple
