"""An MoE checkpoint, streamed from the dense one: all tensors but the FFNs are carried over unchanged."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm

from instruments.errors import CheckpointError, ContractError, NumericsError
from models.checkpoint.folder import read_json
from models.checkpoint.reader import ShardReader
from models.checkpoint.writer import ShardWriter
from models.config import MoEShape
from models.dense import DenseFamily, dense_family, keeps_tied
from models.experts import ExpertWeights, read_part
from models.source import read_config
from models.targets.base import ALIGNMENT, MoETarget, expert_width, gate_scale_of, shared_width
from models.targets.config import emit_config, source_dtype
from models.targets.tiny_onn import copy_code

logger = logging.getLogger(__name__)

_PATTERNS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "spiece.model", "chat_template*", "LICENSE*", "NOTICE*",
)  # fmt: skip


def copy_tokenizer_files(source_folder: Path, out_folder: Path) -> None:
    """Copy tokenizer, chat template, generation defaults and licence, if present.

    Code of a tokenizer's own is not copied, nor the `auto_map` by which transformers would look for it.
    """
    for pattern in _PATTERNS:
        for path in source_folder.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, out_folder / path.name)
    path = out_folder / "tokenizer_config.json"
    try:
        settings = read_json(path) if path.exists() else {}
        code = settings.pop("auto_map", None)
    except (ValueError, AttributeError, TypeError) as error:
        where = str(source_folder / path.name)
        raise CheckpointError("tokenizer_config.json is no JSON object", where=where, do="download it again") from error
    if code is not None:
        logger.warning("the tokenizer's own code is not copied: auto_map of tokenizer_config.json is left out")
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def emit_checkpoint(
    source_folder: Path,
    out_folder: Path,
    *,
    target: MoETarget,
    shape: MoEShape,
    routers: Callable[[int], Tensor],
    experts: Callable[[int], ExpertWeights],
    selection_bias: Callable[[int], Tensor] | None = None,
    dtype: str = "source",
    pad_to: int = ALIGNMENT,
) -> None:
    """Write a Hugging Face folder that transformers loads; without remote code, unless it is the project's own class.

    Args:
        source_folder: the dense checkpoint.
        out_folder: made if it is not there; config.json comes last, so that a broken write is no checkpoint.
        target: the architecture to write; must pass `check_target`.
        shape: E, N, K, S, and whether all layers share the experts.
        routers: layer → ``(E, D)`` router rows, written as they are.
        experts: layer → its experts, unscaled; `gate_scale_of` is applied here. Down may be in fp32, to be
            rounded once: it takes the number format of its gate. For a pool: the layer's share of the experts; the pool
            holds those of the first layer, then those of the second, and so on.
        selection_bias: layer → ``(E,)`` bias added to the logits for the choice only, where a target has one; None: 0.
        dtype: float32, bfloat16, float16, or source: every tensor keeps its own, and the router takes the one that
            config.json names.
        pad_to: experts and always-on neurons are filled up with zero neurons to a multiple of this.
    Raises:
        CheckpointError: the source cannot be read, or the output not written.
        ContractError: routers or experts do not have the shape.
        NumericsError: scaled weights overflow the number format.
    Memory: one shard, one layer's experts (of a pool, all), and the largest tensor.
    """
    config = read_config(source_folder)
    family = dense_family(config)
    if out_folder.resolve() == source_folder.resolve():
        raise CheckpointError("the MoE would overwrite its source", where=str(out_folder), do="choose another folder")
    with ShardReader(source_folder) as reader, ShardWriter(out_folder) as writer:
        main_dtype = _main_dtype(config, family, reader, dtype)
        cast = None if dtype == "source" else main_dtype
        emission = _Emission(reader, writer, target, shape, pad_to, main_dtype, cast)
        emission.copy(family.embedding)
        for layer in tqdm(range(config["num_hidden_layers"]), desc="write checkpoint", unit="layer"):
            names = family.kept(layer, config)
            for name in family.stored(names) if target.own else names:
                emission.copy(name)
            emission.add_router(layer, routers(layer), selection_bias(layer) if selection_bias else None)
            emission.add_experts(layer, experts(layer))
        if shape.pooled:
            emission.add_pool()
        emission.copy(family.final_norm)
        if not (target.own and keeps_tied(config)):
            # Some runtimes do not tie embeddings, even if config.json says so.
            emission.copy(family.head if family.head in reader.names else family.embedding, family.head)
    copy_tokenizer_files(source_folder, out_folder)
    dtype_name = str(main_dtype).removeprefix("torch.")
    if target.own:
        copy_code(out_folder)
    moe_config = emit_config(config, target, shape, dtype_name, pad_to)
    (out_folder / "config.json").write_text(json.dumps(moe_config, indent=2) + "\n", encoding="utf-8")


def checkpoint_dtype(source_folder: Path, asked: str) -> torch.dtype:
    """Number format of the experts that `emit_checkpoint` writes for the same `dtype`."""
    config = read_config(source_folder)
    with ShardReader(source_folder) as reader:
        return _main_dtype(config, dense_family(config), reader, asked)


def _main_dtype(config: dict[str, Any], family: DenseFamily, reader: ShardReader, asked: str) -> torch.dtype:
    name = source_dtype(config) if asked == "source" else asked
    if name is None:
        return reader.dtype(family.ffn(0)[2])
    dtype: torch.dtype = getattr(torch, name)
    return dtype


Projections = tuple[Tensor, Tensor, Tensor]  # gate and up (..., N, D), down (..., D, N)


class _Emission:
    """The tensors of one MoE checkpoint on their way from reader to writer."""

    def __init__(
        self,
        reader: ShardReader,
        writer: ShardWriter,
        target: MoETarget,
        shape: MoEShape,
        pad_to: int,
        main_dtype: torch.dtype,
        cast: torch.dtype | None,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._target, self._shape, self._pad_to = target, shape, pad_to
        self._main_dtype, self._cast = main_dtype, cast
        self._gate_scale = gate_scale_of(target, shape)
        self._pool: list[Projections] = []

    def copy(self, name: str, out_name: str | None = None) -> None:
        self._add(out_name or name, read_part(self._reader, name))

    def add_router(self, layer: int, router_ED: Tensor, bias_E: Tensor | None = None) -> None:
        if router_ED.ndim != 2 or len(router_ED) != self._shape.experts:
            raise ContractError(
                f"router of shape {tuple(router_ED.shape)} for {self._shape.experts} experts", where=f"layer {layer}"
            )
        self._writer.add(self._target.router.format(layer=layer), router_ED.to(self._main_dtype))
        if self._target.selection_bias:
            bias_E = torch.zeros(self._shape.experts) if bias_E is None else bias_E
            scaled_E = bias_E.float() * self._gate_scale.selection_bias_scale
            self._writer.add(self._target.selection_bias.format(layer=layer), scaled_E)
        elif bias_E is not None and bias_E.any():
            raise ContractError(f"{self._target.model_type} has no selection bias", where=f"layer {layer}")

    def add_experts(self, layer: int, experts: ExpertWeights) -> None:
        _check_shape(layer, experts, self._shape)
        routed = (experts.gate_END, experts.up_END, experts.down_EDN)
        width = expert_width(self._shape, self._pad_to)
        if self._shape.pooled:
            self._pool += [_widened(routed, width)] if len(experts.gate_END) else []
        elif self._target.packed:
            self._add_packed(self._target.packed, layer, _widened(routed, width), self._gate_scale.down_scale)
        else:
            for e, weights in enumerate(zip(*routed, strict=True)):
                self._add_ffn(self._target.ffn(layer, e), _widened(weights, width), self._gate_scale.down_scale)
        if shared := shared_width(self._target, self._shape, self._pad_to):
            self._add_shared(layer, experts, shared)

    def add_pool(self) -> None:
        """The experts of all layers as the one pool that every layer borrows."""
        assert self._target.packed_pool is not None, "checked by check_target"
        gate, up, down = (torch.cat(parts) for parts in zip(*self._pool, strict=True))
        if len(gate) != self._shape.experts:
            raise ContractError(
                f"the layers give {len(gate)} experts, not {self._shape.experts}", do="stage=extract fresh=true"
            )
        self._pool = []
        self._add_packed(self._target.packed_pool, 0, (gate, up, down), self._gate_scale.down_scale)

    def _add_shared(self, layer: int, experts: ExpertWeights, width: int) -> None:
        weights = _widened((experts.shared_gate_SD, experts.shared_up_SD, experts.shared_down_DS), width)
        if self._target.packed_shared:
            self._add_packed(self._target.packed_shared, layer, weights, self._gate_scale.shared_down_scale)
        else:
            self._add_ffn(self._target.shared_ffn(layer), weights, self._gate_scale.shared_down_scale)
        if self._target.shared_router:
            row_1D = torch.full((1, experts.gate_END.shape[2]), _tiny(self._main_dtype), dtype=self._main_dtype)
            self._writer.add(self._target.shared_router.format(layer=layer), row_1D)

    def _add_ffn(self, names: tuple[str, str, str], weights: Projections, down_scale: float) -> None:
        gate, up, down = weights
        self._add(names[0], gate)
        self._add(names[1], up)
        self._add_down(names[2], down, down_scale, gate.dtype)

    def _add_packed(self, names: tuple[str, str], layer: int, weights: Projections, down_scale: float) -> None:
        """Gate above up in one tensor, down in another."""
        gate, up, down = weights
        self._add(names[0].format(layer=layer), torch.cat([gate, up], dim=-2))
        self._add_down(names[1].format(layer=layer), down, down_scale, gate.dtype)

    def _add_down(self, name: str, down: Tensor, scale: float, gate_dtype: torch.dtype) -> None:
        """Write the product in the number format of the gate, rounded once; `down` may be more precise."""
        self._writer.add(name, _scaled(name, down, scale, self._cast or gate_dtype))

    def _add(self, name: str, tensor: Tensor) -> None:
        self._writer.add(name, tensor if self._cast is None else tensor.to(self._cast))


def _widened(weights: Projections, width: int) -> Projections:
    """With zero neurons up to `width`."""
    gate, up, down = weights
    zero_neurons = width - gate.shape[-2]
    if not zero_neurons:
        return weights
    rows, columns = (0, 0, 0, zero_neurons), (0, zero_neurons)
    return pad(gate, rows), pad(up, rows), pad(down, columns)


def _tiny(dtype: torch.dtype) -> float:
    """A value for a gate row that pruning does not take for a zero row, and that keeps σ at ½ up to rounding."""
    return 2.0**-24 if dtype == torch.float16 else 2.0**-40


def _scaled(name: str, weight: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    if scale == 1.0:
        return weight.to(dtype)
    scaled = (weight.float() * scale).to(dtype)
    if not scaled.isfinite().all():
        raise NumericsError(
            f"weights times {scale:g} are not finite in {str(dtype).removeprefix('torch.')}",
            where=name,
            do="assemble.dtype=float32, or assemble.target=glm4_moe, which scales no weights",
        )
    return scaled


def _check_shape(layer: int, experts: ExpertWeights, shape: MoEShape) -> None:
    count, n = experts.gate_END.shape[:2]
    found = (count, n, len(experts.shared_gate_SD))
    wanted = (shape.experts, shape.n, shape.always_on)
    if shape.pooled:  # a layer may give any number of experts, or none; `add_pool` checks the sum
        wanted = (count, shape.n if count else n, shape.always_on)
    if found != wanted:
        described = "{} experts of {} neurons and {} always-on neurons"
        raise ContractError(
            f"{described.format(*found)}, not {described.format(*wanted)}",
            where=f"layer {layer}",
            do="stage=extract fresh=true",
        )
