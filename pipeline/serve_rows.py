"""The figures of `pipeline.serve_check`: one row for each runtime and number format."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from models.checkpoint.folder import read_checkpoint
from models.config import GLOBAL_POOL
from models.source import read_config

# Format → largest difference of the mean loss in nats, and smallest share of equal likeliest tokens: in fp32 the effect
# of another order of summation, otherwise that of rounding, which also changes the choice of experts. transformers in
# fp16 keeps 90 % of the likeliest tokens of a carve of Qwen2.5-Coder-0.5B (99 % of the dense model's), in bf16 87 %.
LIMITS = {"f32": (1e-3, 0.99), "f16": (0.05, 0.85), "bf16": (0.1, 0.8), "q8_0": (0.1, 0.8)}
LIMIT_OF_OTHERS = (0.5, 0.6)
_ROUTED = re.compile(r"\.experts\.|\.(input_linear|output_linear)\.|experts\.(gate_up|down)_proj")


@dataclass(frozen=True)
class Row:
    """One runtime and number format."""

    runtime: str
    format: str
    loss: float | None = None  # mean, nats
    difference: float | None = None  # of the mean loss from the reference's
    largest: float | None = None  # of any token's log-probability
    same_best: float | None = None  # share of tokens after which both models predict the same next token
    same_tokens: bool | None = None  # the runtime's own tokenizer gives the reference's tokens
    prompt_ratio: float | None = None  # dense seconds over this model's, median of paired rounds
    decode_ratio: float | None = None
    decode_ceiling: float | None = None  # dense bytes per token over this model's, of GGUF files, which mix formats
    fault: str = ""
    remedy: str = ""  # of the fault

    @property
    def right(self) -> bool:
        """Whether the runtime's results agree with the reference's within the limits."""
        if self.fault or self.difference is None or self.same_best is None:
            return False
        most, least = LIMITS.get(self.format, LIMIT_OF_OTHERS)
        return abs(self.difference) <= most and self.same_best >= least and self.same_tokens is not False


def compare(runtime: str, form: str, found: Mapping[str, Any], reference: Mapping[str, Any]) -> Row:
    """The row of a client's results, compared with the reference's."""
    pairs = list(zip(found["log_probabilities"], reference["log_probabilities"], strict=True))
    loss, expected = (-sum(pair[which] for pair in pairs) / len(pairs) for which in (0, 1))
    best = [ours == theirs for ours, theirs in zip(found["best"], reference["best"], strict=True)]
    tokens = found["tokens"] == reference["tokens"] if "tokens" in found and "tokens" in reference else None
    largest = max(abs(ours - theirs) for ours, theirs in pairs)
    prompt, decode = (_ratio(found[f"{part}_seconds"]) for part in ("prompt", "decode"))
    ceiling = found.get("decode_ceiling")
    return Row(runtime, form, loss, loss - expected, largest, sum(best) / len(best), tokens, prompt, decode, ceiling)


def _ratio(rounds: Sequence[Sequence[float]]) -> float | None:
    """Dense seconds over this model's, median of the rounds."""
    return median(dense / ours for ours, dense in rounds) if rounds else None


def ceilings(checkpoint: Path, dense: Path) -> dict[str, float]:
    """Upper bounds of the speed ratios: weights used per token, the dense model's over the carve's.

    Embeddings are not counted; the output head is counted for decode only, since a prompt needs it once. Bytes have the
    same ratio where all weights have one number format; see `Row.decode_ceiling` for other formats.
    """
    ours, theirs = (dict(_active(folder)) for folder in (checkpoint, dense))
    return {part: theirs[part] / ours[part] for part in ("prompt", "decode")}


def _active(folder: Path) -> Iterator[tuple[str, float]]:
    config = read_config(folder)
    experts = next(
        (int(config[key]) for key in ("n_routed_experts", "num_local_experts", "num_experts") if config.get(key)), 1
    )
    share = int(config.get("num_experts_per_tok") or 1) / experts
    if config.get("topology") == GLOBAL_POOL:  # each layer reads its experts of the pool
        share *= int((config.get("dense") or config)["num_hidden_layers"]) - len(config["dense_layers"])
    layers = head = 0.0
    for name, entry in read_checkpoint(folder).items():
        if "embed_tokens" in name or name.startswith("lm_head"):
            head = float(prod(entry.shape))
        else:
            shared = ".shared" in name
            layers += prod(entry.shape) * (share if _ROUTED.search(name) and not shared and experts > 1 else 1.0)
    yield "prompt", layers
    yield "decode", layers + head


def render(rows: Sequence[Row], missing: Mapping[str, str], ceiling: Mapping[str, float] | None) -> str:
    """The table as Markdown for a model card, and notes on missing runtimes."""
    columns = ["runtime", "weights", "loss", "difference", "largest, one token", "same best, %", "same tokens", "right"]
    lines = [
        [row.runtime, row.format, _shown(row.loss, ".4f"), _shown(row.difference, "+.1e"), _shown(row.largest, ".1e"),
         _shown(row.same_best, ".1%").rstrip("%"), {True: "yes", False: "NO", None: ""}[row.same_tokens],
         "yes" if row.right else f"NO{row.fault and ': ' + row.fault}"]
        for row in rows
    ]  # fmt: skip
    if ceiling:
        columns += ["prompt, × dense (weights allow)", "decode, × dense (bytes allow)"]
        for line, row in zip(lines, rows, strict=True):
            line += [_with(row.prompt_ratio, ceiling["prompt"])]
            line += [_with(row.decode_ratio, row.decode_ceiling or ceiling["decode"])]
    table = tabulate(lines, columns, tablefmt="github", disable_numparse=True)
    remedies = {row.fault: row.remedy for row in rows if row.remedy}
    notes = "".join(f"{fault}: {how}\n" for fault, how in remedies.items())
    notes += "".join(f"{name} not checked: {how}\n" for name, how in missing.items())
    return f"{table}\n\n{notes}"


def _with(ratio: float | None, ceiling: float) -> str:
    return "" if ratio is None else f"{ratio:.2f} ({ceiling:.2f})"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
