"""Dense families: weight names, configuration defaults, and which checkpoints can be carved."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from instruments.dtypes import FLOATING
from instruments.errors import CheckpointError

# Part → name of the fused tensor. Gate and up have half of its rows each; q, k and v have their heads' rows.
_FUSED = {f"mlp.{part}_proj": "mlp.gate_up_proj" for part in ("gate", "up")}
_FUSED |= {f"self_attn.{part}_proj": "self_attn.qkv_proj" for part in "qkv"}


def fused_name(name: str) -> str:
    """Name of the fused tensor that holds this one; `name` itself if it is never fused."""
    for part, whole in _FUSED.items():
        if f".{part}." in name:
            return name.replace(part, whole)
    return name


_LAYER = "model.layers.{layer}."
_FFN = tuple(f"{_LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
_UNUSED = _LAYER + "self_attn.rotary_emb.inv_freq"  # a buffer that old checkpoints hold and no model reads
_PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_PRE_AND_POST_NORMS = (*_PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class DenseFamily:
    """One architecture of gated-FFN decoders. Names hold `{layer}` where they repeat."""

    model_type: str
    # Defaults of transformers' config class for keys that config.json may leave out, as far as they are needed.
    defaults: Mapping[str, Any]
    # The fields below describe the tensors other than the FFN, which are copied unchanged.
    qk_norm: bool = False
    # One norm over the queries of all heads, another over all keys; False: norms of each head.
    norm_of_all_heads: bool = False
    # Key of config.json that gives q, k, v and o a bias; True: q, k and v always have one.
    qkv_bias: bool | str = False
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    norms: tuple[str, ...] = _PRE_NORMS
    # On disk, q, k, v are one tensor, and gate, up another; names in this class are those of the parts.
    fused: bool = False

    def ffn(self, layer: int) -> tuple[str, str, str]:
        """Names of gate, up and down, fused or not."""
        gate, up, down = (name.format(layer=layer) for name in _FFN)
        return gate, up, down

    def attention_biases(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Which of q, k, v and o carry a bias."""
        if self.qkv_bias is True:
            return ("q", "k", "v")
        return ("q", "k", "v", "o") if self.qkv_bias and config.get(self.qkv_bias) else ()

    def kept_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """A layer's tensors that are copied unchanged, attention and norms: name with `{layer}` → shape."""
        dense = {**self.defaults, **config}
        hidden, heads = int(dense["hidden_size"]), int(dense["num_attention_heads"])
        head_dim = int(dense.get("head_dim") or hidden // heads)
        keys = int(dense.get("num_key_value_heads") or heads) * head_dim
        rows = {"q": heads * head_dim, "k": keys, "v": keys, "o": hidden}
        found: dict[str, tuple[int, ...]] = {f"{norm}.weight": (hidden,) for norm in self.norms}
        for letter, width in rows.items():
            found[f"self_attn.{letter}_proj.weight"] = (width, rows["q"] if letter == "o" else hidden)
        for letter in self.attention_biases(config):
            found[f"self_attn.{letter}_proj.bias"] = (rows[letter],)
        if self.qk_norm:
            for letter in "qk":
                found[f"self_attn.{letter}_norm.weight"] = (rows[letter] if self.norm_of_all_heads else head_dim,)
        return {_LAYER + name: shape for name, shape in found.items()}

    def kept(self, layer: int, config: Mapping[str, Any]) -> list[str]:
        """Names of a layer's tensors that are copied unchanged: attention and norms."""
        return [name.format(layer=layer) for name in self.kept_shapes(config)]

    def layer_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """A layer's tensors on disk: name with `{layer}` → shape."""
        width, hidden = int(config["intermediate_size"]), int(config["hidden_size"])
        ffn = dict(zip(_FFN, ((width, hidden), (width, hidden), (hidden, width)), strict=True))
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in (ffn | self.kept_shapes(config)).items():
            whole = fused_name(name) if self.fused else name
            found[whole] = (found[whole][0] + shape[0], *shape[1:]) if whole in found else shape
        return found

    def stored(self, names: Iterable[str]) -> list[str]:
        """Names of the tensors on disk that hold these, without repeats."""
        return list(dict.fromkeys(map(fused_name, names))) if self.fused else list(names)


_LLAMA_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_MISTRAL_DEFAULTS = {
    **_LLAMA_DEFAULTS, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
}  # fmt: skip
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
_OLMO2_DEFAULTS = {"pad_token_id": 1, "eos_token_id": 50279, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
_PHI3_DEFAULTS = {
    "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "sliding_window": None,
}  # fmt: skip
# Only TinyONN can hold these families, and it copies their config.json: only keys that affect shapes are needed here.
_GEMMA_DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
_SMOLLM3_DEFAULTS = {"num_key_value_heads": 4, "tie_word_embeddings": True}

DENSE_FAMILIES = {
    family.model_type: family
    for family in (
        DenseFamily("llama", _LLAMA_DEFAULTS, qkv_bias="attention_bias"),
        DenseFamily("mistral", _MISTRAL_DEFAULTS),
        DenseFamily("qwen2", _QWEN_DEFAULTS, qkv_bias=True),
        DenseFamily("qwen3", _QWEN_DEFAULTS | {"head_dim": 128}, qk_norm=True, qkv_bias="attention_bias"),
        DenseFamily(
            "olmo2", _OLMO2_DEFAULTS, qk_norm=True, norm_of_all_heads=True, qkv_bias="attention_bias", norms=_POST_NORMS
        ),
        DenseFamily("granite", _LLAMA_DEFAULTS, qkv_bias="attention_bias"),
        DenseFamily("phi3", _PHI3_DEFAULTS, fused=True),
        DenseFamily("gemma2", _GEMMA_DEFAULTS, qkv_bias="attention_bias", norms=_PRE_AND_POST_NORMS),
        DenseFamily("gemma3_text", _GEMMA_DEFAULTS, qk_norm=True, qkv_bias="attention_bias", norms=_PRE_AND_POST_NORMS),
        DenseFamily("smollm3", _SMOLLM3_DEFAULTS, qkv_bias="attention_bias"),
    )
}

# Known decoders whose FFN is two Linear layers without a gate.
_UNGATED = re.compile("bloom|codegen|falcon|gpt(2|j|_bigcode|_neox?)|mpt|opt|phi|starcoder2")


def dense_family(config: Mapping[str, Any]) -> DenseFamily:
    """The family of a checkpoint, from its config.json. Raises CheckpointError: it is not supported."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in DENSE_FAMILIES:
        return DENSE_FAMILIES[model_type]
    reason = "has no gated FFN" if _UNGATED.fullmatch(str(model_type)) else "is not supported"
    what = f"architecture {repr(model_type)[:100]} {reason}"
    do = f"choose a dense model of one of these: {', '.join(sorted(DENSE_FAMILIES))}"
    raise CheckpointError(what, where="model_type in config.json", do=do)


def keeps_tied(config: Mapping[str, Any]) -> bool:
    """Whether input and output embedding are one tensor, by config.json or by the family's default."""
    defaults = DENSE_FAMILIES[str(config["model_type"])].defaults
    return bool(config.get("tie_word_embeddings", defaults.get("tie_word_embeddings", False)))


def activation_of(config: Mapping[str, Any]) -> str:
    """The FFN's activation function, by its name in transformers."""
    usual = "gelu_pytorch_tanh" if str(config["model_type"]).startswith("gemma") else "silu"
    return str(config.get("hidden_activation") or config.get("hidden_act") or usual)


def rope_type_of(config: Mapping[str, Any]) -> str:
    """The kind of position encoding, by its name in transformers."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    kind = str((rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, Mapping) else "default")
    return "longrope" if kind == "su" else kind  # the name in early Phi-3 checkpoints


_AGAIN = "download or copy it again"
_BELONGS = "check that config.json belongs to these weights"
_LARGEST = 2**31 - 1  # upper bound for sizes, counts and token ids
REQUIRED_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_tokens(value: object) -> bool:
    tokens = value if isinstance(value, list) else [value]
    return all(type(token) is int and abs(token) <= _LARGEST for token in tokens)


def _is_rope(value: object) -> bool:
    """Whether this is a position encoding: numbers, lists of numbers and a type; or such an object per layer type."""
    if not isinstance(value, dict):
        return False
    sizes = [value.get(key) for key in ("factor", "rope_theta", "original_max_position_embeddings")]
    named = all(isinstance(value.get(key), str | None) for key in ("rope_type", "type"))
    if not named or not all(size is None or (_is_number(size) and size > 0) for size in sizes):
        return False
    numbers = [item for item in value.values() if isinstance(item, int | float) and not isinstance(item, bool)]
    lists = [item for item in value.values() if isinstance(item, list)]
    parts = [item for item in value.values() if isinstance(item, dict)]
    return all(map(_is_number, [*numbers, *(part for item in lists for part in item)])) and all(
        not any(isinstance(item, dict) for item in part.values()) and _is_rope(part) for part in parts
    )


_LAYER_TYPES = ("full_attention", "sliding_attention")

# Checks of the values in config.json that are present and not null.
_KINDS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(
        (*REQUIRED_KEYS, "num_key_value_heads", "head_dim", "max_position_embeddings",
         "original_max_position_embeddings"), lambda value: type(value) is int and 1 <= value <= _LARGEST,
    ),
    **dict.fromkeys(("rms_norm_eps", "initializer_range", "attention_dropout"),
                    lambda value: _is_number(value) and value >= 0),
    **dict.fromkeys(("rope_theta", "query_pre_attn_scalar", "rope_local_base_freq"),
                    lambda value: _is_number(value) and value > 0),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
                     "final_logit_softcapping", "attn_logit_softcapping", "sliding_window", "max_window_layers"),
                    _is_number),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache", "use_sliding_window"),
                    lambda value: isinstance(value, bool)),
    **dict.fromkeys(("hidden_act", "hidden_activation"), lambda value: isinstance(value, str)),
    **dict.fromkeys(("dtype", "torch_dtype"),
                    lambda value: isinstance(value, str) and value.removeprefix("torch.") in FLOATING),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _is_rope),
    "quantization_config": lambda value: isinstance(value, dict),
    "layer_types": lambda value: isinstance(value, list) and all(kind in _LAYER_TYPES for kind in value),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _is_tokens),
}  # fmt: skip


def check_values(config: Mapping[str, Any]) -> list[CheckpointError]:
    """Errors for values in config.json that no dense model has: negative or infinite sizes, wrong types."""
    absent = [key for key in REQUIRED_KEYS if not isinstance(config.get(key), int)]
    problems = [(f"config.json gives no number for {', '.join(absent)}", "")] if absent else []
    given = {key: value for key, value in config.items() if value is not None and key not in absent}
    wrong = [
        f"{key}={repr(given[key])[:60]}" for key, holds in _KINDS.items() if key in given and not holds(given[key])
    ]
    if wrong:
        problems.append(("config.json holds values that no model has", ", ".join(wrong)))
    if not problems:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        key_heads = config.get("num_key_value_heads") or 1
        if config.get("head_dim") is None and hidden % heads:
            what = f"hidden_size={hidden} is no multiple of num_attention_heads={heads}, and there is no head_dim"
            problems.append((what, "config.json"))
        if heads % key_heads:
            what = f"num_attention_heads={heads} is no multiple of num_key_value_heads={key_heads}"
            problems.append((what, "config.json"))
        kinds, layers = config.get("layer_types"), config["num_hidden_layers"]
        if kinds is not None and len(kinds) != layers:
            problems.append((f"layer_types names {len(kinds)} layers, num_hidden_layers={layers}", "config.json"))
    return [CheckpointError(what, where=where, do=_AGAIN) for what, where in problems]


def check_features(config: Mapping[str, Any], family: DenseFamily) -> list[CheckpointError]:
    """Errors for features of a supported family that no MoE target can express."""
    problems = []
    if config.get("mlp_bias"):
        problems.append(("an FFN with biases has no MoE counterpart", "mlp_bias", "choose a model without them"))
    # In embedding models a token may see the one that it should predict.
    causal = {"is_causal": config.get("is_causal", True)}
    causal["use_bidirectional_attention"] = not config.get("use_bidirectional_attention")
    what, do = "with attention to later tokens this is no model of the next token", "choose a causal language model"
    problems += [(what, key, do) for key, holds in causal.items() if not holds]
    if str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.") == "float64":
        do = "load it in float32 with transformers, write it by save_pretrained, and carve that"
        problems.append(("transformers' kernels for experts have no float64", "dtype", do))
    # In Gemma 3, layers with a sliding window have their own rotation.
    per_layer = any(isinstance(value, dict) for value in (config.get("rope_parameters") or {}).values())
    if per_layer and family.model_type != "gemma3_text":
        what = "a position encoding of its own per layer has no MoE counterpart"
        problems.append((what, "rope_parameters", "choose a model with one for all layers"))
    return [CheckpointError(what, where=f"{key} in config.json", do=do) for what, key, do in problems]


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], family: DenseFamily
) -> list[CheckpointError]:
    """Errors for tensors that are missing, unknown, or not of the shape that follows from config.json."""
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    if layers > len(shapes):
        what = f"config.json says {layers:,} layers, and the weights are {len(shapes):,} tensors in all"
        return [CheckpointError(what, where="num_hidden_layers in config.json", do=_BELONGS)]
    embedding = (int(config["vocab_size"]), hidden)
    expected: dict[str, tuple[int, ...]] = {family.embedding: embedding, family.final_norm: (hidden,)}
    for name, shape in family.layer_shapes(config).items():
        expected |= {name.format(layer=layer): shape for layer in range(layers)}
    if family.head in shapes or not keeps_tied(config):
        expected[family.head] = embedding
    ignored = {_UNUSED.format(layer=layer) for layer in range(layers)}
    both = sorted(expected.keys() & shapes.keys())
    problems = {
        "tensors are missing": sorted(expected.keys() - shapes.keys()),
        "tensors are unknown to this architecture": sorted(shapes.keys() - expected.keys() - ignored),
        "tensors do not have the shape that config.json says": [
            f"{name} is {shapes[name]}, not {expected[name]}" for name in both if shapes[name] != expected[name]
        ],
    }
    found = []
    for what, names in problems.items():
        where = ", ".join(name[:200] for name in names[:3]) + (" ..." if len(names) > 3 else "")
        found += [CheckpointError(f"{len(names)} {what}", where=where, do=_BELONGS)] if names else []
    return found
