"""Continued pretraining from a carve and from other starts, at equal tokens and at equal training FLOPs.

PYTHONPATH=.:tests python -m studies.pretraining_starts OUTPUT --carve carve=outputs/latest/checkpoint --scan SCAN
PYTHONPATH=.:tests python -m studies.pretraining_starts OUTPUT --report curves.png

Trains each start of the embedded model on Python code that it has not seen (--text, by default torch's own), measures
it on files kept apart and on the standard library, and adds a line to OUTPUT/curves.jsonl for each measurement. Starts
that are there are not trained again. About 8 minutes of one core for a million tokens of one start.
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from studies.frontier import write_mask
from tabulate import tabulate
from torch import nn
from transformers import AutoModelForCausalLM

from models.config import MoEShape
from models.loading import load_tokenizer, padding_id
from models.routing import GateKind, LinearRouter, choose_experts, relative_gates
from models.source import EMBEDDED
from models.stream import LayerStream
from models.training import Part, RouterWatch, Routing, parameter_groups, part_of
from stages.artifacts.carve import NeuronStatistics
from stages.calibration.batches import TokenStream
from stages.evaluate.baselines import LayerFacts, select_cmoe
from stages.losses import measure_losses
from stages.text.batches import TokenSequence, batch_sequences
from stages.text.config import DataConfig
from stages.text.sequences import load_text
from stages.train.loop import BETAS, collate, order_sequences
from stages.train.objective import balance_loss, count_load
from stages.train.stage import load_trainable

CPU, LENGTH, BATCH = torch.device("cpu"), 256, 8
SHAPE = MoEShape(experts=16, n=64, top_k=4, always_on=256)
POINTS = [0, 30_000, 100_000, 300_000, 1_000_000]
CARVE = 3_427_072  # active parameters of the default carve, whose training FLOPs all starts also reach
STARTS = {
    "cmoe": "CMoE (arXiv:2502.04416)",
    "random": "random split, 8 of 16 (LLaMA-MoE, arXiv:2406.16554)",
    "upcycled": "sparse upcycling, 2 of 4 copies (arXiv:2212.05055)",
    "mask": "static mask of the same width, aligned",
    "dense": "the dense model",
}
BALANCE, WARMUP, FILES = 0.01, 20, 400  # weight of the load balancing loss; steps; files that are read


class Routed(nn.Module):
    """A dense FFN whose neurons are gated by experts: a start that no stage writes.

    gates: `chosen` K times the softmax of the chosen logits; `cmoe` 1 + softmax · (a learnable scale that starts at 0),
    with logits |h| of each expert's typical neuron.
    """

    def __init__(self, rows_2FD, down_DF, expert_F, top_k, router_WD, *, cmoe=False):
        super().__init__()
        self.rows_2FD, self.down_DF, self.router_WD = map(nn.Parameter, (rows_2FD, down_DF, router_WD))
        self.register_buffer("expert_F", expert_F, persistent=False)  # 0: always on; e + 1: of expert e
        self.top_k, self.seen = top_k, None
        self.scale_E = nn.Parameter(torch.zeros(len(router_WD) // 2)) if cmoe else None

    def forward(self, x_BTD):
        """The output; `seen` keeps the routing."""
        x_TD = x_BTD.flatten(0, 1)
        logits_TE = x_TD @ self.router_WD.T
        if self.scale_E is not None:
            gate_TE, up_TE = logits_TE.chunk(2, 1)
            logits_TE = (nn.functional.silu(gate_TE) * up_TE).abs()
        chosen_TK = choose_experts(logits_TE, self.top_k)
        if self.scale_E is None:
            gates_TK = relative_gates(GateKind.SOFTMAX_OF_CHOSEN, logits_TE, chosen_TK)
        else:
            gates_TK = (1 + logits_TE.softmax(1) * self.scale_E).gather(1, chosen_TK)
        self.seen = Routing(logits_TE, chosen_TK.detach())
        gates_TE = torch.zeros_like(logits_TE).scatter(1, chosen_TK, gates_TK)
        gates_TE = torch.cat([torch.ones_like(gates_TE[:, :1]), gates_TE], 1)
        gate_TF, up_TF = (x_TD @ self.rows_2FD.T).chunk(2, 1)
        h_TF = nn.functional.silu(gate_TF) * up_TF * gates_TE[:, self.expert_F]
        return (h_TF @ self.down_DF.T).view_as(x_BTD)


def load_embedded():
    """The dense model in float32."""
    return AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)


def cmoe_layers(scan, seed):
    """Each layer's CMoE experts, and the gate and up rows of their typical neurons, from the default run's text."""
    tokenizer, statistics = load_tokenizer(EMBEDDED, trust_remote_code=False), NeuronStatistics.load(scan)
    text = load_text(DataConfig(tokens=8192), tokenizer, "calibration").sequences
    router = LinearRouter.without_bias(torch.zeros(SHAPE.experts, 256))
    with LayerStream(EMBEDDED, device=CPU) as stream, torch.no_grad():
        tokens = TokenStream(stream, batch_sequences(text, 4096, padding_id(tokenizer)))
        for index, layer in enumerate(stream.layers()):
            tokens.enter(layer)
            none_EN = torch.zeros(SHAPE.experts, SHAPE.n, dtype=torch.long)
            facts = LayerFacts(layer.ffn, none_EN, none_EN[0, :0], router, statistics.contribution[index], SHAPE, seed)
            yield select_cmoe(facts, tokens.inputs)
            tokens.leave(map(layer.ffn, tokens.inputs))


def build(start, wanted, seed):
    """The model of this start, and the watch of a carve's routers."""
    if start in wanted.carves:
        model = load_trainable(wanted.carves[start])
        return model, RouterWatch(model)
    if start == "mask":
        if not (folder := wanted.output / "mask").exists():
            write_mask(folder, EMBEDDED, wanted.scan, SHAPE.active_width)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), None
    model, generator = load_embedded(), torch.Generator().manual_seed(seed)
    found = list(cmoe_layers(wanted.scan, seed)) if start == "cmoe" else [None] * 4
    for layer, chosen in zip(model.model.layers if start != "dense" else (), found, strict=start != "dense"):
        ffn = layer.mlp
        gate_FD, up_FD, down_DF = (getattr(ffn, f"{name}_proj").weight.data for name in ("gate", "up", "down"))
        copies, top_k = (4, 2) if start == "upcycled" else (1, 8)
        expert_F = torch.arange(copies).repeat_interleave(1024) + 1
        router_WD = torch.randn(copies, 256, generator=generator) * 0.02
        if start == "random":
            expert_F = torch.randperm(1024, generator=generator) // 64 + 1
            router_WD = torch.randn(16, 256, generator=generator) * 0.02
        if chosen is not None:
            (facts, typical), top_k = chosen, SHAPE.top_k
            expert_F = torch.zeros(1024, dtype=torch.long)
            expert_F[facts.neurons_EN.flatten()] = torch.arange(len(facts.neurons_EN)).repeat_interleave(SHAPE.n) + 1
            router_WD = torch.cat([typical.gate_FD, typical.up_FD])
        rows_2FD = torch.cat([gate_FD.repeat(copies, 1), up_FD.repeat(copies, 1)])
        # Upcycled copies: the gates of the chosen sum to 1, so that the start computes the dense FFN.
        down_DF = down_DF.repeat(1, copies) / (top_k if copies > 1 else 1)
        layer.mlp = Routed(rows_2FD, down_DF, expert_F, top_k, router_WD, cmoe=chosen is not None)
    return model, None


def routings_of(model, watch, run):
    """The result of `run`, and the routings of its forward pass."""
    if watch is not None:
        with watch.collect() as routings:
            return run(), routings
    return run(), [layer.mlp.seen for layer in model.model.layers if isinstance(layer.mlp, Routed)]


def active_parameters(model):
    """Parameters that a token multiplies with: all but those of experts that it does not choose."""
    total = sum(value.numel() for value in model.parameters())
    for name, value in model.named_parameters():
        if ".experts." in name:
            total -= value.numel() * (1 - model.config.num_experts_per_tok / len(value))
    for ffn in (module for module in model.modules() if isinstance(module, Routed)):
        routed = int((ffn.expert_F > 0).sum())
        total -= 3 * 256 * routed * (1 - ffn.top_k / int(ffn.expert_F.max()))
    return round(total)


def read_code(folder, tokenizer):
    """Sequences of 256 tokens of every file below a folder: for training, and of every fiftieth file."""
    parts = {False: [], True: []}
    files = sorted(folder.rglob("*.py"))
    random.Random(0).shuffle(files)
    for number, file in enumerate(files[:FILES]):
        parts[number % 50 == 0] += tokenizer(file.read_text(encoding="utf-8", errors="ignore")).input_ids
    for ids in parts.values():
        pieces = (ids[first : first + LENGTH] for first in range(0, len(ids) - LENGTH + 1, LENGTH))
        yield [TokenSequence("code", piece, piece) for piece in pieces]


@dataclass
class Measure:
    """Figures of a model on two texts."""

    new: list
    known: list
    dense: nn.Module

    @torch.no_grad()
    def __call__(self, model, watch, at_start):
        """Losses, KL from the dense model on the standard library, load, and choices kept since the start."""
        model.eval()
        found, choices = {}, []
        for name, batches in (("new", self.new), ("known", self.known)):
            sums = torch.zeros(3, dtype=torch.float64)
            for batch in batches:
                models = {"": self.dense, "model": model}
                run = lambda batch=batch, models=models: measure_losses(models, [batch])["model"]  # noqa: E731
                mean, routings = routings_of(model, watch, run)
                sums += torch.tensor([mean.total, mean.divergence * mean.tokens, mean.tokens])
                choices.append([routing.chosen_TK.sort(1).values for routing in routings])
            found |= {name: float(sums[0] / sums[2]), f"{name}_kl": float(sums[1] / sums[2])}
        model.train()
        if not choices[0]:
            return found, None
        chosen_LTK = [torch.cat(parts) for parts in zip(*choices, strict=True)]
        if at_start is not None:
            pairs = zip(chosen_LTK, at_start, strict=True)
            found["kept_choices"] = float(
                np.mean([(a[:, :, None] == b[:, None]).any(2).float().mean() for a, b in pairs])
            )
        loads = [chosen.flatten().bincount(minlength=4).float() for chosen in chosen_LTK]
        found["load_max_over_mean"] = max(float(load.max() / load.mean()) for load in loads)
        return found, chosen_LTK


def groups_of(model, rate):
    """Routers learn three times as fast as all other weights, at one rate for every start."""
    if any(part_of(name) is Part.ROUTER for name, _ in model.named_parameters()):
        return parameter_groups(model, router_rate=3 * rate, expert_rate=rate, rest_rate=rate)
    rates = {True: [], False: []}
    for name, value in model.named_parameters():
        rates[name.endswith(("router_WD", "scale_E"))].append(value)
    return [{"params": rates[False], "lr": rate}, {"params": rates[True], "lr": 3 * rate}]


def train(start, seed, wanted, text, measure) -> Iterator[dict]:
    """Train one start, and yield figures after each number of tokens in `wanted.points` and at the carve's FLOPs."""
    model, watch = build(start, wanted, seed)
    active = active_parameters(model)
    points = {round(point / LENGTH / BATCH) for point in wanted.points}
    steps = sorted(points | {round(point * CARVE / active) for point in points})
    optimizer = torch.optim.AdamW(groups_of(model, wanted.rate), betas=BETAS, weight_decay=0.0, fused=True)
    rates, at_start = [group["lr"] for group in optimizer.param_groups], None
    sequences = order_sequences(text, 0, steps[-1] * BATCH, seed)
    for step in range(steps[-1] + 1):
        if step in steps:
            figures, choices = measure(model, watch, at_start)
            at_start = choices if at_start is None else at_start
            yield {"tokens": step * BATCH * LENGTH, "at_tokens": step in points, "active": active, **figures}
        if step == steps[-1]:
            return
        batch = collate(sequences[step * BATCH : (step + 1) * BATCH], 0, CPU)
        run = lambda batch=batch: model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss  # noqa: E731
        loss, routings = routings_of(model, watch, run)
        if routings:
            loss = loss + BALANCE * balance_loss(routings, count_load(routings, batch["rows"]), batch["rows"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group, peak in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = peak * min(1, (step + 1) / WARMUP)
        optimizer.step()
        optimizer.zero_grad()


def losses_at(lines, start, tokens):
    """Seed → loss of a start after so many tokens, within two steps of them."""
    near = (line for line in lines if line["start"] == start and abs(line["tokens"] - tokens) < 2 * BATCH * LENGTH)
    return {line["seed"]: line["new"] for line in near}


def mean_and_range(values):
    """Mean over seeds, with half of the range between them."""
    if not values:
        return ""
    return f"{np.mean(values):.3f}" + (f" ± {np.ptp(values) / 2:.3f}" if len(values) > 1 else "")


def report(lines, file):
    """A table of losses after the carve's tokens and after its FLOPs; a picture of the distances from the carve."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels, rows = figure.subplots(1, 2, sharey=True), []
    points = sorted({line["tokens"] for line in lines if line["start"] == "carve"})
    for start, active in {line["start"]: line["active"] for line in lines}.items():
        row = [start, f"{active / 1e6:.2f} M"]
        for panel, factor in zip(panels, (1, CARVE / active), strict=True):
            found = [losses_at(lines, start, point * factor) for point in points]
            row += [mean_and_range([*losses.values()]) for losses in found]
            apart = [
                np.mean([loss - losses_at(lines, "carve", point)[seed] for seed, loss in losses.items()] or [np.nan])
                for point, losses in zip(points, found, strict=True)
            ]
            panel.plot(range(len(points)), apart, marker=".", label=start)
        rows.append(row)
    names = [f"{point / 1e6:.2f} M" for point in points]
    head = ["start", "active", *names, *(f"FLOPs of {name}" for name in names)]
    print(tabulate(rows, head, tablefmt="github", disable_numparse=True))  # noqa: T201
    for panel, what in zip(panels, ("after as many tokens", "after the training FLOPs of as many tokens"), strict=True):
        panel.set(xlabel=what, xticks=range(len(points)), xticklabels=names, ylim=(-0.1, 0.5))
        panel.axhline(0, color="black", linewidth=0.5)
    panels[0].set_ylabel("loss above the carve's, nats")
    panels[1].legend(fontsize=8)
    figure.savefig(file, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--carve", nargs="*", default=[], metavar="NAME=CHECKPOINT", help="starts that stages wrote")
    parser.add_argument("--scan", type=Path, help="folder of a result of stage=scan")
    parser.add_argument("--text", type=Path, default=Path(torch.__file__).parent, help="a folder of Python files")
    parser.add_argument("--starts", nargs="*", choices=STARTS, default=[*STARTS], help="the others")
    parser.add_argument("--points", type=int, nargs="*", default=POINTS, help="tokens")
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order of the text, and of random experts and routers"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="only a table and a picture of what is measured")
    wanted = parser.parse_args()
    wanted.carves = {name: Path(folder) for name, _, folder in (word.partition("=") for word in wanted.carve)}
    wanted.output.mkdir(parents=True, exist_ok=True)
    file = wanted.output / "curves.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if wanted.report:
        report(lines, wanted.report)
        return
    tokenizer = load_tokenizer(EMBEDDED, trust_remote_code=False)
    text, kept = read_code(wanted.text, tokenizer)
    kept = [kept[place] for place in np.linspace(0, len(kept) - 1, 64).astype(int)]
    known = load_text(DataConfig(heldout_tokens=16384), tokenizer, "heldout").sequences
    measure = Measure(*(batch_sequences(part, 4096, 0) for part in (kept, known)), load_embedded().eval())
    print(f"{len(text) * LENGTH:,} tokens for training")  # noqa: T201
    done = {(line["start"], line["seed"], line["rate"]) for line in lines if line["tokens"] >= max(wanted.points)}
    for start in (*wanted.carves, *wanted.starts):
        if (start, wanted.seed, wanted.rate) in done:
            continue
        for figures in train(start, wanted.seed, wanted, text, measure):
            line = {"start": start, "seed": wanted.seed, "rate": wanted.rate, **figures}
            with file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
