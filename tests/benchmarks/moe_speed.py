"""Tokens per second of the MoE against its dense source: prompts, and decoding with a cache, of 1 and of 32 sequences.

The MoE is drawn on the device: speed does not depend on the weights, and random routers load the experts about evenly.
"""

import tempfile
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.rows import Row
from benchmarks.timing import Task, divide, take_turns
from benchmarks.workbench import Workbench
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from models.config import MoEShape
from models.finding import find_decoder
from models.targets.config import select_target
from models.targets.config_json import emit_config
from models.training import STRAIGHT_THROUGH
from pipeline.shape import ShapeRequest, resolve_shape

# batched_mm gathers the experts of each token: it is made for decoding, and would fill the memory in a prompt.
# STRAIGHT_THROUGH without gradients computes all experts at once.
PROMPT, DECODE = ("grouped_mm", "eager", STRAIGHT_THROUGH), ("grouped_mm", "batched_mm", "eager")
SEQUENCES = (1, 32)
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
    def read(self) -> None:
        """Run the whole batch into a new cache, and choose the next token."""
        found = self.model(input_ids=self.ids_BT, use_cache=True, logits_to_keep=1)
        name = "cache" if "cache" in found else "past_key_values"  # before transformers 5.24
        self.state = {"cache": {name: found[name]}, "ids": found.logits[:, -1:].argmax(-1)}

    @torch.no_grad()
    def decode(self) -> None:
        """Decode `steps` tokens per sequence, one by one."""
        ids_B1 = self.state["ids"]
        for _ in range(self.steps):
            found = self.model(input_ids=ids_B1, use_cache=True, **self.state["cache"])
            ids_B1 = found.logits[:, -1:].argmax(-1)

    def prompt_task(self) -> Task:
        """Time a prompt; dropping the cache is not timed."""
        return Task(self.read, self.choose, self.state.clear)

    def decode_task(self) -> Task:
        """Time decoding; filling the cache, by the fastest implementation for many tokens, is not timed."""

        def fill() -> None:
            if self.implementation:
                self.model.set_experts_implementation("grouped_mm")
            self.read()
            self.choose()

        return Task(self.decode, fill, self.state.clear)

    def graph_task(self) -> Task:
        """Time a token of every sequence without a cache, replayed as a CUDA graph: no kernel waits for the host."""
        self.choose()
        ids_B1 = self.ids_BT[:, :1].contiguous()
        device = ids_B1.device  # not the current one, on which nothing would be captured
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))  # for the ids
        with torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(stream):
            for _ in range(2):  # libraries allocate in the first pass
                self.model(input_ids=ids_B1, use_cache=False)
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                self.model(input_ids=ids_B1, use_cache=False)
        return Task(lambda: [graph.replay() for _ in range(self.steps)])


def measure_moe(bench: Workbench, options: Namespace) -> list[Row]:
    """Tokens/s of the dense model, and of the MoE relative to it for every share of active neurons.

    The models take turns.
    """
    shapes = {share: shape_of(bench.width, options.experts, share) for share in options.active}
    carved = {share: draw_moe(bench, shape) for share, shape in shapes.items()}
    phases = ("prompt", "decode", "decode as CUDA graph") if bench.device.type == "cuda" else ("prompt", "decode")
    generator, vocabulary = torch.Generator().manual_seed(0), bench.model.config.vocab_size
    rows: list[Row] = []
    for sequences in SEQUENCES:
        ids_BT = torch.randint(vocabulary, (sequences, options.length), generator=generator).to(bench.device)
        for phase in phases:
            rows += compare_speed(phase, bench, carved, shapes, ids_BT, options)
    return rows


def compare_speed(
    phase: str, bench: Workbench, carved: dict[float, PreTrainedModel], shapes: dict[float, MoEShape],
    ids_BT: Tensor, options: Namespace,
) -> list[Row]:  # fmt: skip
    """Rows of one phase for a batch."""
    runners = {DENSE: Runner(bench.model, ids_BT, options.steps)}
    notes: dict[str, str] = {}
    ways = {"prompt": PROMPT, "decode": DECODE}.get(phase, ("grouped_mm",))
    for share, model in carved.items():
        for implementation in ways:
            name = f"{100 * share:g} % active, {implementation}"
            runners[name] = Runner(model, ids_BT, options.steps, implementation)
            shape = shapes[share]
            notes[name] = f"{shape.top_k} of {shape.experts} × {shape.n} + {shape.always_on}"
    made = {"prompt": Runner.prompt_task, "decode": Runner.decode_task}.get(phase, Runner.graph_task)
    seconds = take_turns({name: made(runner) for name, runner in runners.items()}, options.repetitions, bench.device)
    tokens = ids_BT.numel() if phase == "prompt" else len(ids_BT) * options.steps
    speed = {name: [tokens / spent for spent in found] for name, found in seconds.items()}
    what = f"{phase}, {len(ids_BT)} × {options.length}" if phase == "prompt" else f"{phase}, {len(ids_BT)} at once"
    rows = [Row(f"{what}, dense", speed.pop(DENSE), unit="tokens/s")]
    for name, found in speed.items():
        note = f"{sorted(found)[len(found) // 2]:,.0f} tokens/s; {notes[name]}"
        rows.append(Row(f"{what}, MoE {name} ÷ dense, tokens/s", divide(found, rows[0].values), note=note))
    return rows


def shape_of(width: int, experts: int, active: float) -> MoEShape:
    """E experts of F // E neurons; always-on neurons and experts per token are resolved as for a carve."""
    return resolve_shape(ShapeRequest(experts, max(1, width // experts), None, None, active), width)


def draw_moe(bench: Workbench, shape: MoEShape) -> PreTrainedModel:
    """The class and the sizes of a carve, with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        bench.model.config.save_pretrained(folder)
        decoder = find_decoder(Path(folder), weights=False)
    dtype = str(bench.model.dtype).removeprefix("torch.")
    config = emit_config(decoder, select_target(decoder, "auto", shape), shape, dtype, tied=True)
    with bench.device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=bench.model.dtype, attn_implementation="sdpa",
            experts_implementation="grouped_mm",
        )  # fmt: skip
    return model.requires_grad_(False).eval()
