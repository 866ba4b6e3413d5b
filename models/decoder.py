"""What a dense decoder is made of: its layers, their FFN, its tensors. Imports no torch.

`structure.py` finds it in transformers' own class, `finding.py` keeps it; nothing here or there knows a family by name.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, Literal

PROJECTIONS = ("gate", "up", "down")
_TABLE = re.compile(r"(?:embed\w*|wte|wpe)\.weight$")
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Rows:
    """Rows of a Linear layer of the FFN: all, or one half if gate and up are one layer."""

    linear: str  # path within the FFN
    part: Literal["whole", "first", "second"] = "whole"

    def of(self, length: int) -> slice:
        """The rows among `length`."""
        return {"whole": slice(0, length), "first": slice(0, length // 2), "second": slice(length // 2, length)}[
            self.part
        ]


@dataclass(frozen=True)
class FFNPlan:
    """How a layer's FFN is made: down_scale · down(act(gate_scale · gate(x)) · up(x)), without biases.

    Without a gate, gate and up are the same matrix W, and act(z) is the activation's quotient by z.
    """

    path: str  # of the module within the layer
    gate: Rows
    up: Rows
    down: str  # path within the FFN
    act: str  # of `find_activation`
    activation: str  # its name in ACT2FN, or its class
    width: int  # F
    gate_scale: float = 1.0
    down_scale: float = 1.0

    @property
    def is_gated(self) -> bool:
        """Whether gate and up are two matrices."""
        return self.gate != self.up

    def rows(self, part: str) -> Rows:
        """Where gate, up or down is stored."""
        return {"gate": self.gate, "up": self.up, "down": Rows(self.down)}[part]

    def scale(self, part: str) -> float:
        """Factor of gate, up or down."""
        return {"gate": self.gate_scale, "up": 1.0, "down": self.down_scale}[part]


@dataclass(frozen=True)
class Decoder:
    """A dense decoder. Names of tensors are those of transformers' class, whose state_dict has them in this order."""

    model_class: str  # in transformers, e.g. Qwen3ForCausalLM
    model_type: str  # of the text part
    config: Mapping[str, Any]  # of the text part: config.json's values, else the defaults of transformers
    config_json: Mapping[str, Any]  # as it is on the disk
    layers: str  # path of the list of decoder layers
    depth: int  # L
    hidden: int  # D
    vocabulary: int  # V
    ffn: FFNPlan  # of every layer, but for the width of narrow ones
    embedding: str  # weight of the input embedding
    head: str  # weight of the output embedding
    tied: bool  # by config.json both are one tensor; a checkpoint may yet hold two, which are then not tied
    shapes: Mapping[str, tuple[int, ...]]  # of every tensor; of tied ones only the first
    # Tensor → tensors on disk, several if they are concatenated; empty if the weights are not here.
    stored: Mapping[str, tuple[str, ...]]
    unknown: tuple[str, ...] = ()  # tensors on disk that the class does not have

    @property
    def width(self) -> int:
        """F."""
        return self.ffn.width

    @cached_property
    def narrow(self) -> dict[int, int]:
        """Layers whose FFN has fewer neurons than F → their number, 0 without an FFN; they stay dense."""
        widths = {layer: self.shapes.get(self.weight(layer, "down"), (0, 0))[1] for layer in range(self.depth)}
        return {layer: width for layer, width in widths.items() if width != self.width}

    @property
    def lacking(self) -> float:
        """How many layers of F neurons the narrow layers lack."""
        return sum(1 - width / self.width for width in self.narrow.values())

    @property
    def is_wrapper(self) -> bool:
        """Whether the text decoder is a part of a model that may also see images or hear."""
        return "text_config" in self.config_json or bool(self.config_json.get("vision_config"))  # the latter: Qwen2-VL

    @property
    def token_ids(self) -> dict[str, Any]:
        """Ids of special tokens: those of config.json itself, else of its text part; none beyond the vocabulary."""
        found = {}
        for key, part in product(("bos_token_id", "eos_token_id", "pad_token_id"), (self.config, self.config_json)):
            ids = part.get(key)
            # Some wrappers' default for padding is a token that their text part does not have.
            if all(one in range(self.vocabulary) for one in (ids if isinstance(ids, list) else [ids])):
                found[key] = ids
        return found

    @property
    def windows(self) -> Literal["none", "some", "all"]:
        """Which layers see only a window of tokens."""
        config = self.config
        window = config.get("sliding_window")
        if window is None or config.get("use_sliding_window") is False:
            return "none"
        if window >= config.get("max_position_embeddings", math.inf):  # as in Phi-4, which has none in this way
            return "none"
        kinds = {kind == "sliding_attention" for kind in config.get("layer_types") or ["sliding_attention"]}
        return "some" if len(kinds) == 2 else "all" if True in kinds else "none"

    @cached_property
    def ffn_names(self) -> frozenset[str]:
        """Names of the tensors of all FFNs."""
        linears = {self.ffn.rows(part).linear for part in PROJECTIONS}
        places = product(range(self.depth), linears)
        names = (f"{self.layers}.{layer}.{self.ffn.path}.{linear}.weight" for layer, linear in places)
        return frozenset(name for name in names if name in self.shapes)

    def has_ffn(self, layer: int) -> bool:
        """Whether a layer has an FFN; layers of some hybrids are attention or Mamba alone."""
        return self.weight(layer, "down") in self.shapes

    def weight(self, layer: int, part: str) -> str:
        """Name of the tensor that holds gate, up or down."""
        return f"{self.layers}.{layer}.{self.ffn.path}.{self.ffn.rows(part).linear}.weight"

    def place(self, name: str, *, own_names: bool) -> str:
        """Where a tensor of a target that is named for `model.layers.N.mlp` goes in a carve of this decoder.

        `own_names`: as in transformers' class of the dense model; else as on its disk, which runtimes read.
        """
        found = _LAYER_NAME.fullmatch(name)
        if found is None:
            return name
        layer, rest = found.groups()
        down = self.weight(int(layer), "down")
        own = f"{self.layers}.{layer}."
        if own_names:
            return own + (self.ffn.path + rest.removeprefix("mlp") if rest.startswith("mlp.") else rest)
        (stored, *_others), end = self.stored.get(down, (down,)), down.removeprefix(own)
        return (stored.removesuffix(end) if stored.endswith(end) else own) + rest

    def layer_names(self, layer: int) -> list[str]:
        """Names of a layer's tensors without its FFN: attention, norms and the like."""
        return [name for name in self._by_layer.get(layer, ()) if name not in self.ffn_names]

    @cached_property
    def _by_layer(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name in self.shapes:
            if name.startswith(f"{self.layers}."):
                found.setdefault(int(name.removeprefix(f"{self.layers}.").partition(".")[0]), []).append(name)
        return found

    @property
    def frame_names(self) -> list[str]:
        """Names of the tensors outside of the layers: embeddings, final norm, head, and a wrapper's other parts."""
        return [name for name in self.shapes if not name.startswith(f"{self.layers}.")]

    @cached_property
    def unread(self) -> frozenset[str]:
        """Names of tensors that a token of text does not use whole: tables of embeddings, a wrapper's other parts."""
        text = (f"{self.layers.rpartition('.')[0]}.", self.head.removesuffix("weight"))
        outside = [name for name in self.frame_names if self.is_wrapper and not name.startswith(text)]
        tables = [name for name in self.frame_names if _TABLE.search(name) and len(self.shapes[name]) == 2]
        used = {self.head, self.embedding} if self.tied else {self.head}
        return frozenset({*outside, *tables, self.embedding} - used)

    def count(self, names: Iterable[str]) -> int:
        """Numbers in these tensors."""
        return sum(prod(self.shapes[name]) for name in names)
