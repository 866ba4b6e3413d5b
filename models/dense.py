"""Dense families: weight names, configuration defaults, and which checkpoints can be carved."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from instruments.errors import CheckpointError

# Part → the fused tensor's name. Gate and up have half the rows each; the head counts give the rows of q, k and v.
_FUSED = {
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
    "self_attn.q_proj": "self_attn.qkv_proj",
    "self_attn.k_proj": "self_attn.qkv_proj",
    "self_attn.v_proj": "self_attn.qkv_proj",
}


def fused_name(name: str) -> str:
    """The fused tensor that holds this one; the name itself for a tensor that is never fused."""
    for part, whole in _FUSED.items():
        if f".{part}." in name:
            return name.replace(part, whole)
    return name


_LAYER = "model.layers.{layer}."
_PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_PRE_AND_POST_NORMS = (*_PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class DenseFamily:
    """One architecture of gated-FFN decoders. Names hold `{layer}` where they repeat."""

    model_type: str
    # Values of keys that config.json leaves out (the defaults of transformers' config class).
    defaults: Mapping[str, Any]
    # Tensors of a layer other than the FFN, carried over as they are.
    qk_norm: bool = False
    # Key of config.json that gives q, k, v (and, if named `attention_bias`, o) a bias; True: q, k, v always have one.
    qkv_bias: bool | str = False
    gate: str = _LAYER + "mlp.gate_proj.weight"
    up: str = _LAYER + "mlp.up_proj.weight"
    down: str = _LAYER + "mlp.down_proj.weight"
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    # Buffers that old checkpoints hold and no model reads.
    ignored: tuple[str, ...] = (_LAYER + "self_attn.rotary_emb.inv_freq",)
    norms: tuple[str, ...] = _PRE_NORMS
    # q, k, v are one tensor on disk, gate and up another; all names here are those of the parts.
    fused: bool = False

    def ffn(self, layer: int) -> tuple[str, str, str]:
        """Names of gate, up and down; `read_part` finds them where they are fused."""
        return self.gate.format(layer=layer), self.up.format(layer=layer), self.down.format(layer=layer)

    def attention_biases(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Which of q, k, v and o carry a bias."""
        if self.qkv_bias is True:
            return ("q", "k", "v")
        return ("q", "k", "v", "o") if self.qkv_bias and config.get(self.qkv_bias) else ()

    def kept(self, layer: int, config: Mapping[str, Any]) -> list[str]:
        """Names of a layer's tensors that are carried over unchanged: attention and norms."""
        attention = [f"{letter}_proj.weight" for letter in "qkvo"]
        attention += [f"{letter}_proj.bias" for letter in self.attention_biases(config)]
        attention += ["q_norm.weight", "k_norm.weight"] if self.qk_norm else []
        names = [*(f"{norm}.weight" for norm in self.norms), *(f"self_attn.{name}" for name in attention)]
        return [_LAYER.format(layer=layer) + name for name in names]

    def stored(self, names: Iterable[str]) -> list[str]:
        """The tensors on disk that hold these, each once."""
        return list(dict.fromkeys(map(fused_name, names))) if self.fused else list(names)


_LLAMA_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_MISTRAL_DEFAULTS = _LLAMA_DEFAULTS | {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
_OLMO2_DEFAULTS = {"pad_token_id": 1, "eos_token_id": 50279, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
_PHI3_DEFAULTS = {
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "pad_token_id": 32000,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "sliding_window": None,
}
_GEMMA_DEFAULTS = {
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_SMOLLM3_DEFAULTS = {
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "pad_token_id": 128004,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}

DENSE_FAMILIES = {
    family.model_type: family
    for family in (
        DenseFamily("llama", _LLAMA_DEFAULTS, qkv_bias="attention_bias"),
        DenseFamily("mistral", _MISTRAL_DEFAULTS),
        DenseFamily("qwen2", _QWEN_DEFAULTS, qkv_bias=True),
        DenseFamily("qwen3", _QWEN_DEFAULTS | {"head_dim": 128}, qk_norm=True, qkv_bias="attention_bias"),
        DenseFamily("olmo2", _OLMO2_DEFAULTS, qk_norm=True, qkv_bias="attention_bias", norms=_POST_NORMS),
        DenseFamily("granite", _LLAMA_DEFAULTS, qkv_bias="attention_bias"),
        DenseFamily("phi3", _PHI3_DEFAULTS, fused=True),
        DenseFamily(
            "gemma2",
            _GEMMA_DEFAULTS | {"max_position_embeddings": 8192},
            qkv_bias="attention_bias",
            norms=_PRE_AND_POST_NORMS,
        ),
        DenseFamily(
            "gemma3_text",
            _GEMMA_DEFAULTS | {"max_position_embeddings": 131072},
            qk_norm=True,
            qkv_bias="attention_bias",
            norms=_PRE_AND_POST_NORMS,
        ),
        DenseFamily("smollm3", _SMOLLM3_DEFAULTS, qkv_bias="attention_bias"),
    )
}

# Known decoders whose FFN is two plain Linear layers: there is no gate row to carve a neuron by.
_UNGATED = frozenset(
    {
        "bloom",
        "codegen",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "mpt",
        "opt",
        "phi",
        "starcoder2",
    }
)


def dense_family(config: Mapping[str, Any]) -> DenseFamily:
    """The family of a checkpoint, from its config.json. Raises CheckpointError: it is not supported."""
    model_type = config.get("model_type")
    if model_type in DENSE_FAMILIES:
        return DENSE_FAMILIES[model_type]
    what = f"architecture {model_type!r} has no gated FFN" if model_type in _UNGATED else None
    raise CheckpointError(
        what or f"architecture {model_type!r} is not supported",
        where="model_type in config.json",
        do=f"choose a dense model of one of these: {', '.join(sorted(DENSE_FAMILIES))}",
    )


def keeps_tied(config: Mapping[str, Any]) -> bool:
    """Whether input and output embedding are one tensor, by config.json or by the family's default."""
    defaults = DENSE_FAMILIES[str(config["model_type"])].defaults
    return bool(config.get("tie_word_embeddings", defaults.get("tie_word_embeddings", False)))


REQUIRED_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def check_features(config: Mapping[str, Any], family: DenseFamily) -> list[CheckpointError]:
    """Features of a checkpoint of a supported family that no MoE target can express."""
    absent = [key for key in REQUIRED_KEYS if not isinstance(config.get(key), int)]
    if absent:
        return [CheckpointError(f"config.json gives no number for {', '.join(absent)}", do="download or copy it again")]
    found = []
    if config.get("mlp_bias"):
        found.append(("an FFN with biases has no MoE counterpart", "mlp_bias", "choose a model without them"))
    # Gemma 3 has another rotation in layers with a window than in those without.
    per_layer = any(isinstance(value, dict) for value in (config.get("rope_parameters") or {}).values())
    if per_layer and family.model_type != "gemma3_text":
        found.append(
            ("a position encoding of its own per layer has no MoE counterpart", "rope_parameters",
             "choose a model with one for all layers")
        )  # fmt: skip
    return [CheckpointError(what, where=f"{key} in config.json", do=do) for what, key, do in found]


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], family: DenseFamily
) -> list[CheckpointError]:
    """Tensors that are missing, unknown, or not of the shape in config.json."""
    layers = range(int(config["num_hidden_layers"]))
    expected = {family.embedding, family.final_norm}
    wrong = []
    for layer in layers:
        wanted = _ffn_shapes(config, family, layer)
        expected |= {*wanted, *family.stored(family.kept(layer, config))}
        for name, shape in wanted.items():
            if name in shapes and shapes[name] != shape:
                wrong.append(f"{name} is {shapes[name]}, not {shape}")
    ignored = {template.format(layer=layer) for template in family.ignored for layer in layers} | {family.head}
    return [
        *_problem("tensors are missing", expected - shapes.keys()),
        *_problem("tensors are unknown to this architecture", shapes.keys() - expected - ignored),
        *_problem("tensors do not have the shape that config.json says", wrong),
    ]


def _ffn_shapes(config: Mapping[str, Any], family: DenseFamily, layer: int) -> dict[str, tuple[int, int]]:
    """The FFN's tensors on disk."""
    width, hidden = int(config["intermediate_size"]), int(config["hidden_size"])
    names = family.stored(family.ffn(layer))
    rows = (2 * width,) if family.fused else (width, width)
    shapes = [*((count, hidden) for count in rows), (hidden, width)]
    return dict(zip(names, shapes, strict=True))


def _problem(what: str, names: Iterable[str]) -> list[CheckpointError]:
    found = sorted(names)
    if not found:
        return []
    shown = ", ".join(found[:3]) + (" ..." if len(found) > 3 else "")
    return [CheckpointError(f"{len(found)} {what}", where=shown, do="check that config.json belongs to these weights")]
