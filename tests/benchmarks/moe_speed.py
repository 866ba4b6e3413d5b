"""Tokens per second of the MoE against its dense source: prefill, and decoding with a KV cache."""

import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.rows import Row
from benchmarks.timing import Task, divide, take_turns
from benchmarks.workbench import Workbench
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from models.checkpoint.shards import DenseReader
from models.config import MoEShape
from models.emit import emit_checkpoint
from models.experts import slice_experts
from models.finding import find_decoder
from models.source import EMBEDDED
from models.targets.config import select_target
from pipeline.shape import ShapeRequest, resolve_shape

# batched_mm gathers the experts of each token: made for decoding, it would fill the memory in a prefill.
PREFILL, DECODE = ("grouped_mm", "eager"), ("grouped_mm", "batched_mm", "eager")
DENSE = "dense"


@dataclass
class Runner:
    """A model and the batch it is timed on."""

    model: PreTrainedModel
    ids_BT: Tensor
    steps: int
    implementation: str | None = None  # of the experts; None: a dense model
    state: dict[str, Any] = field(default_factory=dict)

    def choose(self) -> None:
        """Select this runner's implementation of the experts; runners share the model."""
        if self.implementation:
            self.model.set_experts_implementation(self.implementation)

    @torch.no_grad()
    def prefill(self) -> None:
        """Run the whole batch into a new cache, and choose the next token."""
        found = self.model(input_ids=self.ids_BT, use_cache=True, logits_to_keep=1)
        self.state = {"cache": found.past_key_values, "ids": found.logits[:, -1:].argmax(-1)}

    @torch.no_grad()
    def decode(self) -> None:
        """Decode `steps` tokens per sequence, one by one."""
        ids_B1 = self.state["ids"]
        for _ in range(self.steps):
            found = self.model(input_ids=ids_B1, past_key_values=self.state["cache"], use_cache=True)
            ids_B1 = found.logits[:, -1:].argmax(-1)

    def prefill_task(self) -> Task:
        """Time a prefill; dropping the cache is not timed."""
        return Task(self.prefill, self.choose, self.state.clear)

    def decode_task(self) -> Task:
        """Time decoding; filling the cache, by the fastest implementation for many tokens, is not timed."""

        def fill() -> None:
            if self.implementation:
                self.model.set_experts_implementation("grouped_mm")
            self.prefill()
            self.choose()

        return Task(self.decode, fill, self.state.clear)


def measure_moe(bench: Workbench, options: Namespace) -> list[Row]:
    """Tokens/s of the dense model, and of the MoE relative to it for every share of active neurons.

    The models take turns. Checkpoints are written and read in the same way as for users.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, dense_folder(bench, options, Path(folder)) as dense:
        shapes = {share: shape_of(bench.width, options.experts, share) for share in options.active}
        dtype = str(bench.model.dtype).removeprefix("torch.")
        carved = {
            share: load_moe(write_moe(dense, Path(folder) / f"moe-{share}", shape, dtype), bench)
            for share, shape in shapes.items()
        }
        rows += compare_speed("prefill", bench, carved, shapes, options)
        rows += compare_speed("decode", bench, carved, shapes, options)
    return rows


def compare_speed(
    phase: str, bench: Workbench, carved: Mapping[float, PreTrainedModel], shapes: Mapping[float, MoEShape],
    options: Namespace,
) -> list[Row]:  # fmt: skip
    """Rows of one phase, prefill or decode."""
    ids_BT = bench.batch.input_ids.to(bench.device)
    runners = {DENSE: Runner(bench.model, ids_BT, options.steps)}
    notes: dict[str, str] = {}
    for share, model in carved.items():
        for implementation in PREFILL if phase == "prefill" else DECODE:
            name = f"{100 * share:g} % active, {implementation}"
            runners[name] = Runner(model, ids_BT, options.steps, implementation)
            shape = shapes[share]
            notes[name] = f"{shape.top_k} of {shape.experts} × {shape.n} + {shape.always_on}"
    tasks: dict[str, Task] = {
        name: runner.prefill_task() if phase == "prefill" else runner.decode_task() for name, runner in runners.items()
    }
    seconds = take_turns(tasks, options.repetitions, bench.device)
    tokens = ids_BT.numel() if phase == "prefill" else len(ids_BT) * options.steps
    speed = {name: [tokens / spent for spent in found] for name, found in seconds.items()}
    rows = [Row(f"{phase}, dense", speed.pop(DENSE), unit="tokens/s")]
    for name, found in speed.items():
        note = f"{sorted(found)[len(found) // 2]:,.0f} tokens/s; {notes[name]}"
        rows.append(Row(f"{phase}, MoE {name} ÷ dense, tokens/s", divide(found, rows[0].values), note=note))
    return rows


@contextmanager
def dense_folder(bench: Workbench, options: Namespace, scratch: Path) -> Iterator[Path]:
    """Folder of the dense checkpoint; weights that were drawn are saved first."""
    if not (options.shape or options.random):
        yield options.model or EMBEDDED
        return
    bench.model.save_pretrained(scratch / "dense")
    yield scratch / "dense"


def load_moe(folder: Path, bench: Workbench) -> PreTrainedModel:
    """Load the MoE as users do."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=bench.model.dtype, experts_implementation="grouped_mm", attn_implementation="sdpa"
    )
    return model.to(bench.device).requires_grad_(False).eval()


def shape_of(width: int, experts: int, active: float) -> MoEShape:
    """E experts of F // E neurons; always-on neurons and experts per token are resolved as for a carve."""
    return resolve_shape(ShapeRequest(experts, max(1, width // experts), None, None, active), width)


def write_moe(dense: Path, out: Path, shape: MoEShape, dtype: str) -> Path:
    """Emit the checkpoint.

    The partition does not affect speed, so experts get the neurons in order, again from the first if E·n exceeds their
    number. Random router rows load the experts about evenly.
    """
    decoder = find_decoder(dense)
    neurons = torch.arange(decoder.width)
    always_S, routed = neurons[: shape.always_on], neurons[shape.always_on :]
    slots = torch.arange(shape.experts * shape.n) % len(routed)
    neurons_EN = routed[slots].view(shape.experts, shape.n)
    generator = torch.Generator().manual_seed(0)
    with DenseReader(dense) as reader:
        emit_checkpoint(
            dense,
            out,
            target=select_target(decoder, "auto", shape),
            shape=shape,
            routers=lambda _layer: torch.randn(shape.experts, decoder.hidden, generator=generator),
            experts=lambda layer: slice_experts(reader, layer, neurons_EN, always_S),
            dtype=dtype,
        )
    return out
