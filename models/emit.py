"""Write the MoE checkpoint, streamed from the dense one: all tensors except the FFNs are copied unchanged."""

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm
from transformers import TokenizersBackend

from instruments.errors import CheckpointError, ContractError, NumericsError
from models.checkpoint.folder import COPIED, PROCESSORS, read_json
from models.checkpoint.shards import DenseReader, ShardWriter
from models.config import MoEShape
from models.decoder import PROJECTIONS
from models.experts import ExpertWeights
from models.loading import load_tokenizer
from models.targets.base import MoETarget, expert_width, gate_scale_of, shared_width
from models.targets.config import targets_of, text_of
from models.targets.config_json import emit_config, source_dtype
from models.targets.tiny_onn import copy_code

logger = logging.getLogger(__name__)

_CODE = {".py", ".pyc", ".so", ".pkl", ".pickle", ".pt", ".pth", ".bin"}  # files that can run code


def copy_tokenizer_files(source_folder: Path, out_folder: Path, *, text_only: bool = False) -> None:
    """Copy tokenizer, chat template, generation defaults and licence, if present, but neither code nor `auto_map`.

    tokenizer_config.json is rewritten so that transformers 4.57 and 5 both read it. Raises CheckpointError.
    """
    for pattern in (pattern for pattern in COPIED if not (text_only and pattern in PROCESSORS)):
        for path in source_folder.glob(pattern):
            if path.is_file() and path.suffix.lower() not in _CODE:
                copy = out_folder / path.relative_to(source_folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
    path = out_folder / "tokenizer_config.json"
    if not path.exists():
        return
    try:
        stored = read_json(path)
        settings = respell_tokenizer(stored)
    except (ValueError, AttributeError, TypeError) as error:
        where = str(source_folder / path.name)
        raise CheckpointError("tokenizer_config.json is no JSON object", where=where, do="download it again") from error
    if "auto_map" in stored:
        logger.warning("the tokenizer's own code is not copied: auto_map of tokenizer_config.json is left out")
    if settings != stored:
        # ASCII with escapes: a lone surrogate is valid JSON, but has no UTF-8.
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def respell_tokenizer(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite tokenizer settings so that transformers 4.57 and 5 give the same tokens; `auto_map` is removed.

    transformers 4.57 has no class TokenizersBackend, and its extra_special_tokens is a dict, not a list.
    """
    settings = {key: value for key, value in stored.items() if key != "auto_map"}
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(extra := settings.get("extra_special_tokens"), list):
        del settings["extra_special_tokens"]
        settings["additional_special_tokens"] = [*(settings.get("additional_special_tokens") or []), *extra]
    return settings


def keep_tokens(source_folder: Path, out_folder: Path) -> None:
    """Make the copied tokenizer give the dense model's tokens in transformers 4.57 and 5.

    transformers 5 takes a tokenizer's class from the architecture, and some classes ignore rules in tokenizer.json. So
    the copy gets the rules that the dense model's class applies, and the class that applies them unchanged.
    """
    try:
        dense = load_tokenizer(source_folder, trust_remote_code=False)
    except CheckpointError:  # there is none, or it needs its own code
        return
    if not isinstance(dense, TokenizersBackend):  # written in Python
        return
    rules, path = out_folder / "tokenizer.json", out_folder / "tokenizer_config.json"
    if type(dense) is not TokenizersBackend or not rules.exists():
        # Compact: with indentation, a large vocabulary would exceed MAX_VOCABULARY_BYTES.
        rules.write_text(dense.backend_tokenizer.to_str(), encoding="utf-8")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    settings: dict[str, Any] = {name: str(token) for name in names if (token := getattr(dense, name))}
    settings |= read_json(path) if path.exists() else {}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": dense.padding_side}
    settings["model_input_names"] = [*dense.model_input_names]  # with token_type_ids in transformers 4.57, else
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def emit_checkpoint(
    source_folder: Path,
    out_folder: Path,
    *,
    target: MoETarget,
    shape: MoEShape,
    routers: Callable[[int], Tensor],
    experts: Callable[[int], ExpertWeights],
    dtype: str = "source",
    pad_to: int | None = None,
    text_only: bool = False,
    tied_embeddings: bool = True,
) -> None:
    """Write a Hugging Face folder that transformers loads, without remote code unless the target is TinyONN.

    config.json is written last: an interrupted write leaves no checkpoint. `target` must pass `check_target`. For each
    layer, `routers` gives ``(E, D)`` rows, written unchanged; `experts` unscaled experts, which are scaled here, and
    down rounded once to the number format of its gate. A pool holds them in layer order. With dtype=source every tensor
    keeps its number format, experts the given one, and routers take that of config.json. `pad_to`: see `expert_width`;
    `text_only`: see `text_part`; with `tied_embeddings`, embeddings that the dense model ties are one tensor, otherwise
    two.
    Raises CheckpointError; ContractError: routers or experts of another shape; NumericsError: scaled weights overflow.
    Memory: one shard, one layer's experts (of a pool, all), and the largest tensor.
    """
    if out_folder.resolve() == source_folder.resolve():
        raise CheckpointError("the MoE would overwrite its source", where=str(out_folder), do="choose another folder")
    with DenseReader(source_folder, text_only=text_only) as reader, ShardWriter(out_folder) as writer:
        tied = tied_embeddings and reader.tied
        emission = _Emission(reader, writer, target, shape, pad_to, _main_dtype(reader, dtype), dtype == "source")
        emission.copy_frame()
        for layer in tqdm(range(reader.decoder.depth), desc="write checkpoint", unit="layer"):
            emission.copy_layer(layer)
            if layer not in shape.dense_layers:
                emission.add_router(layer, routers(layer))
                emission.add_experts(layer, experts(layer))
                emission.add_constants(layer)
        emission.finish(tied=tied)
        decoder = reader.decoder
    copy_tokenizer_files(source_folder, out_folder, text_only=text_only)
    if target.is_tiny_onn:
        copy_code(out_folder)
    dtype = str(emission.main_dtype).removeprefix("torch.")
    config = emit_config(decoder, target, shape, dtype, pad_to, tied=tied)
    keep_tokens(source_folder, out_folder)
    (out_folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def checkpoint_dtype(source_folder: Path, asked: str) -> torch.dtype:
    """The number format that `emit_checkpoint` writes to config.json, and for routers, with dtype=`asked`."""
    with DenseReader(source_folder) as reader:
        return _main_dtype(reader, asked)


def _main_dtype(reader: DenseReader, asked: str) -> torch.dtype:
    decoder, said = reader.decoder, reader.decoder.config_json  # `config` has the format of a model without weights
    name = (source_dtype(said) or source_dtype(text_of(said))) if asked == "source" else asked
    if name is None:
        return reader.dtype(decoder.weight(0, "down"))
    dtype: torch.dtype = getattr(torch, name)
    return dtype


Projections = tuple[Tensor, Tensor, Tensor]  # gate and up (..., N, D), down (..., D, N)


@dataclass
class _Emission:
    """Copies and converts the tensors of one MoE checkpoint."""

    reader: DenseReader
    writer: ShardWriter
    target: MoETarget
    shape: MoEShape
    pad_to: int | None
    main_dtype: torch.dtype
    keeps_dtypes: bool  # every tensor keeps its number format; otherwise all get `main_dtype`
    pool: list[Projections] = field(default_factory=list)

    def copy(self, name: str) -> None:
        tensor = self.reader.tensor(name)
        copies = {name: tensor} if self.target.is_tiny_onn else self.target.copies(self.reader.decoder, name, tensor)
        for out_name, copied in copies.items():
            self._add(self._stored_name(out_name), copied)

    def copy_frame(self) -> None:
        """Copy what is around the layers: embeddings, final norm, and a wrapper's other parts."""
        decoder = self.reader.decoder
        for name in decoder.frame_names:
            if name != decoder.head and name in decoder.stored:
                self.copy(name)
        kept = {part for parts in decoder.stored.values() for part in parts}
        if left_out := [name for name in self.reader.names if name not in kept and "rotary_emb" not in name]:
            # Such as layers that predict the second next token.
            of_text = "outside of the text part" if self.reader.text_only else "that transformers does not read"
            what = f"tensors {of_text} are left out"
            logger.warning("%d %s: %s ...", len(left_out), what, ", ".join(left_out[:3]))

    def copy_layer(self, layer: int) -> None:
        """Copy attention and norms, and the FFN of a layer that stays dense."""
        decoder = self.reader.decoder
        for name in decoder.layer_names(layer):
            self.copy(name)
        if layer not in self.shape.dense_layers or not decoder.has_ffn(layer):
            return
        if self.target.is_tiny_onn:
            for name in dict.fromkeys(decoder.weight(layer, part) for part in PROJECTIONS):
                self.copy(name)
            return
        for part, name in zip(PROJECTIONS, self.target.parts, strict=True):
            self._add(self._place(self.target.dense, layer, part=name), self.reader.projection(layer, part))

    def finish(self, *, tied: bool) -> None:
        """Write the experts of all layers as one pool, and the output embedding unless it is the input's, too."""
        if self.shape.pooled:
            self._add_pool()
        if not tied:
            decoder = self.reader.decoder
            head = self.reader.tensor(decoder.embedding if self.reader.tied else decoder.head)
            self._add(self._stored_name(decoder.head), head)

    def add_router(self, layer: int, router_ED: Tensor) -> None:
        experts = self.shape.experts
        if router_ED.ndim != 2 or len(router_ED) != experts:
            what = f"router of shape {tuple(router_ED.shape)} for {experts} experts"
            raise ContractError(what, where=f"layer {layer}")
        self.writer.add(self._place(self.target.router, layer), router_ED.to(self.main_dtype))
        if self.target.selection_bias:
            self.writer.add(self._place(self.target.selection_bias, layer), torch.zeros(experts))

    def add_experts(self, layer: int, experts: ExpertWeights) -> None:
        _check_shape(layer, experts, self.shape)
        target, scale = self.target, gate_scale_of(self.target, self.shape)
        routed = _widened((experts.gate_END, experts.up_END, experts.down_EDN), expert_width(self.shape, self.pad_to))
        if self.shape.pooled:
            self.pool += [routed] if len(experts.gate_END) else []
        elif target.packed:
            self._add_ffn(target.packed, layer, routed, scale.down_scale)
        else:
            for e, weights in enumerate(zip(*routed, strict=True)):
                self._add_ffn(target.ffn(layer, e), layer, weights, scale.down_scale)
        if not (width := shared_width(target, self.shape, self.pad_to)):
            return
        shared = _widened((experts.shared_gate_SD, experts.shared_up_SD, experts.shared_down_DS), width)
        self._add_ffn(target.packed_shared or target.shared_ffn(layer), layer, shared, scale.shared_down_scale)
        if target.shared_router:
            # Tiny, so that σ is ½ up to rounding; not zero, so that pruning does not remove the row.
            tiny = 2.0**-24 if self.main_dtype == torch.float16 else 2.0**-40
            row_1D = torch.full((1, experts.gate_END.shape[2]), tiny, dtype=self.main_dtype)
            self.writer.add(self._place(target.shared_router, layer), row_1D)

    def add_constants(self, layer: int) -> None:
        """Write the tensors of a carved layer that the dense one does not have."""
        for name, constant in self.target.more(self.reader.decoder, self.shape).items():
            place = self._place(name, layer)
            if constant.of is None:
                tensor = torch.full(constant.shape, constant.value)
            else:
                own_name = self.reader.decoder.place(constant.of.format(layer=layer), own_names=True)
                copied = self.reader.tensor(own_name)
                tensor = (copied.float() * constant.value).to(copied.dtype)
            as_loaded = tensor.to(self.main_dtype)
            if not as_loaded.isfinite().all() or (as_loaded == 0).logical_and(tensor != 0).any():
                what = f"{constant.value:g} is beyond {str(self.main_dtype).removeprefix('torch.')}"
                raise NumericsError(what, where=place, do="assemble.dtype=bfloat16, or assemble.dtype=float32")
            self._add(place, tensor)

    def _add_pool(self) -> None:
        assert self.target.packed_pool is not None, "checked by check_target"
        gate, up, down = (torch.cat(parts) for parts in zip(*self.pool, strict=True))
        if len(gate) != self.shape.experts:
            what = f"the layers give {len(gate)} experts, not {self.shape.experts}"
            raise ContractError(what, do="stage=extract fresh=true")
        self.pool = []
        down_scale = gate_scale_of(self.target, self.shape).down_scale
        self._add_ffn(self.target.packed_pool, 0, (gate, up, down), down_scale)

    def _add_ffn(self, names: tuple[str, ...], layer: int, weights: Projections, down_scale: float) -> None:
        """Write gate, up and down under three names; or gate above up under one, down under another.

        Down may have a higher precision than its gate: it is scaled, then rounded once to the output format.
        """
        gate, up, down = weights
        rows = (gate, up) if len(names) == 3 else (torch.cat([gate, up], dim=-2),)
        *row_names, down_name = (self._place(name, layer) for name in names)
        dtype = gate.dtype if self.keeps_dtypes else self.main_dtype
        down = self._scaled(down_name, down, down_scale, dtype)
        if names == self.target.packed and self.target.transposed:
            rows, down = (rows[0].transpose(1, 2),), down.transpose(1, 2)
        for name, tensor in zip(row_names, rows, strict=True):
            self._add(name, tensor)
        self.writer.add(down_name, down)

    def _scaled(self, name: str, weight: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        if scale == 1.0:
            return _cast(name, weight, dtype)
        scaled = (weight.float() * scale).to(dtype)
        if not scaled.isfinite().all():
            what = f"weights times {scale:g} are not finite in {str(dtype).removeprefix('torch.')}"
            able = targets_of(self.reader.decoder, self.shape)
            other = next(target.model_type for target in able if target.factor_key)
            do = f"assemble.dtype=float32, or assemble.target={other}, which scales no weights"
            raise NumericsError(what, where=name, do=do)
        return scaled

    def _place(self, name: str, layer: int, **parts: str) -> str:
        """The name on disk of a tensor that the target names as in a model without a wrapper."""
        return self.reader.decoder.place(name.format(layer=layer, **parts), own_names=self._own_names)

    def _stored_name(self, name: str) -> str:
        """The name on disk of a tensor that is copied."""
        stored = self.reader.decoder.stored.get(name, ())
        return stored[0] if len(stored) == 1 and not self._own_names else name

    @property
    def _own_names(self) -> bool:
        """Whether names on disk are those of transformers' class; a family's wrapper keeps its own."""
        return self.target.is_tiny_onn or not self.reader.decoder.is_wrapper

    def _add(self, name: str, tensor: Tensor) -> None:
        self.writer.add(name, tensor if self.keeps_dtypes else _cast(name, tensor, self.main_dtype))


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another number format. Raises NumericsError: its finite numbers are beyond that format."""
    cast = tensor.to(dtype) if tensor.is_floating_point() else tensor  # BatchNorm's counter
    if dtype != tensor.dtype and not cast.isfinite().all() and tensor.isfinite().all():
        what = f"weights up to {tensor.abs().max().item():g} are not finite in {str(dtype).removeprefix('torch.')}"
        raise NumericsError(what, where=name, do="assemble.dtype=float32, or assemble.dtype=source")
    return cast


def _widened(weights: Projections, width: int) -> Projections:
    """Pad with zero neurons to `width`."""
    gate, up, down = weights
    zero_neurons = width - gate.shape[-2]
    if not zero_neurons:
        return weights
    rows, columns = (0, 0, 0, zero_neurons), (0, zero_neurons)
    return pad(gate, rows), pad(up, rows), pad(down, columns)


def _check_shape(layer: int, experts: ExpertWeights, shape: MoEShape) -> None:
    count, n = experts.gate_END.shape[:2]
    found = (count, n, len(experts.shared_gate_SD))
    wanted = (shape.experts, shape.n, shape.always_on)
    if shape.pooled:  # a layer may give any number of experts, or none; `_add_pool` checks the sum
        wanted = (count, shape.n if count else n, shape.always_on)
    if found != wanted:
        described = "{} experts of {} neurons and {} always-on neurons"
        what = f"{described.format(*found)}, not {described.format(*wanted)}"
        raise ContractError(what, where=f"layer {layer}", do="stage=extract fresh=true")
