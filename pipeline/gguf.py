"""`python -m pipeline.gguf CHECKPOINT OUT.gguf`: writes a carve as GGUF with llama.cpp's converter and quantiser."""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from instruments.errors import CheckpointError, ConfigError, UserError, check_output, exit_code, say
from models.checkpoint.folder import list_shards, read_checkpoint
from models.config import MoEShape, setting_word
from models.dense import rope_type_of
from models.source import read_config
from models.targets.config import MOE_TARGETS, check_target, targets_of
from pipeline.disk import explain_os_error, free_bytes, in_mib

# Types that the converter writes, with bytes per weight; the quantiser writes all others.
CONVERTED = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 1.07}
QUANTISED = ("q4_0", "q4_k_m", "q5_k_m", "q6_k")
# Weights of a row that share a scale, and the type that llama.cpp uses if the row length is no multiple of it.
BLOCKS = {"q8_0": 32, "q4_0": 32, "q4_k_m": 256, "q5_k_m": 256, "q6_k": 256}
FALLBACKS = {"q4_k_m": "q5_0 or q8_0", "q5_k_m": "q5_1 or q8_0", "q6_k": "q8_0"}
INSTALL = {
    "llama_cpp": "pip install llama-cpp-python",
    "converter": "pip download --no-deps --no-binary :all: llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz, then "
    "--llama-cpp llama_cpp_python-*/vendor/llama.cpp",
    "sentencepiece": "pip install sentencepiece",
}


@dataclass(frozen=True)
class Clients:
    """Paths of llama.cpp's source and of Python interpreters that may have client packages installed."""

    llama_cpp: Path | None
    pythons: tuple[Path, ...]

    def holding(self, module: str) -> Path | None:
        """The first interpreter that has the module."""
        script = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        held = (python for python in self.pythons if not subprocess.run([python, "-c", script], check=False).returncode)
        return next(held, None)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add the options with the paths of clients."""
        parser.add_argument(
            "--llama-cpp", type=Path, metavar="FOLDER", help="llama.cpp's source, for its converter (or LLAMA_CPP)"
        )
        parser.add_argument(
            "--python", type=Path, action="append", default=[], metavar="PATH", help="another interpreter with clients"
        )

    @classmethod
    def of(cls, wanted: argparse.Namespace) -> "Clients":
        """This interpreter and those of --python. Raises ConfigError: a path is no interpreter."""
        folder = wanted.llama_cpp or os.environ.get("LLAMA_CPP")
        if missing := [str(path) for path in wanted.python if not os.access(path, os.X_OK) or path.is_dir()]:
            do = "--python FOLDER_OF_ENVIRONMENT/bin/python"
            raise ConfigError(f"no interpreter: {', '.join(missing)}", where="--python", do=do)
        return cls(Path(folder) if folder else None, (Path(sys.executable), *wanted.python))


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the checkpoint or llama.cpp fails, 2 wrong command line or missing programs."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.gguf", description="Write a carve as a GGUF file with llama.cpp's own programs."
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a carve")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    types = [*CONVERTED, *QUANTISED]
    parser.add_argument("--type", default="q8_0", choices=types, help=f"{', '.join(types)}; default q8_0")
    Clients.add_options(parser)
    wanted = parser.parse_args(words)

    def work() -> None:
        check_carve(wanted.checkpoint)
        notes = check_convertible(read_config(wanted.checkpoint))
        for note in [*notes, *describe_fallbacks(wanted.checkpoint, wanted.type)]:
            say(f"{note}\n")
        check_tokenizer(wanted.checkpoint)
        check_output(wanted.out)
        if wanted.out.exists():
            raise ConfigError(f"{wanted.out} exists already", where="command line", do="name another output file")
        write_gguf(wanted.checkpoint, wanted.out, wanted.type, Clients.of(wanted))
        say(f"{in_mib(wanted.out.stat().st_size)} in {wanted.out}\n")

    return exit_code(work)


def check_carve(folder: Path) -> None:
    """Raises CheckpointError: no checkpoint, or its architecture is none of the MoE targets."""
    if not (folder / "config.json").is_file():
        raise no_checkpoint(folder)
    model_type = read_config(folder).get("model_type")
    if not isinstance(model_type, str) or model_type not in MOE_TARGETS:
        do = f"python -m pipeline model=local {setting_word('model.path', str(folder))}"
        raise CheckpointError(f"{model_type} is no architecture that a carve becomes", where=str(folder), do=do)
    list_shards(folder)


def no_checkpoint(*folders: Path) -> CheckpointError:
    """The error for folders without config.json."""
    what, do = "no config.json, so no checkpoint", "python -m pipeline, which leaves one in outputs/latest/checkpoint"
    if all((folder / "adapter_config.json").is_file() for folder in folders):
        what, do = "an adapter of PEFT, no checkpoint", "model.merge_and_unload().save_pretrained(FOLDER), then FOLDER"
    return CheckpointError(what, where=", ".join(map(str, folders)), do=do)


def check_tokenizer(folder: Path) -> None:
    """Raises CheckpointError: there is no tokenizer, which `save_pretrained` of a model does not write."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        do = "copy the tokenizer from the carve that was trained (stages/train/RECIPES.md has the command)"
        raise CheckpointError("no tokenizer.json, and a GGUF file needs one", where=str(folder), do=do)


def check_convertible(config: Mapping[str, Any]) -> list[str]:
    """Notes on differences between llama.cpp and the carve. Raises ConfigError: llama.cpp cannot run the carve."""
    target = MOE_TARGETS[config["model_type"]]
    if fault := llama_cpp_fault(config):
        raise ConfigError(fault, where=f"architecture {target.architecture}", do=_alternative(config))
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings", 0)
    limits = {}
    if (target.sliding_window or target.layer_windows) and window and window < longest:
        limits["sliding window"] = window
    if rope_type_of(config) == "dynamic":
        limits["dynamic position encoding"] = longest
    name = target.architecture.removesuffix("ForCausalLM")
    return [
        f"llama.cpp gives {name} no {feature}: texts of up to {tokens:,} tokens are right (-c {tokens})"
        for feature, tokens in limits.items()
    ]


def describe_fallbacks(checkpoint: Path, outtype: str) -> list[str]:
    """Notes on weights that llama.cpp silently writes in a larger type because their rows do not fit this type."""
    block = BLOCKS.get(outtype, 1)
    shapes = [entry.shape for entry in read_checkpoint(checkpoint).values() if len(entry.shape) > 1]
    odd = [shape for shape in shapes if shape[-1] % block]
    if not odd:
        return []
    share, lengths = sum(map(prod, odd)) / sum(map(prod, shapes)), {shape[-1] for shape in odd}
    larger = {FALLBACKS.get(outtype, "16 bits") if length % 32 == 0 else "16 bits" for length in lengths}
    # Experts can be padded with zero neurons, the hidden size cannot.
    remedy = f"carve with assemble.pad_to={block}"
    if read_config(checkpoint)["hidden_size"] in lengths:
        remedy = "--type q8_0" if block > BLOCKS["q8_0"] else "--type bf16"
    return [
        f"{outtype} wants rows of multiples of {block}: {share:.0%} of the weights have rows of "
        f"{', '.join(map(str, sorted(lengths)))} and are written as {' or '.join(sorted(larger))}, which is larger and "
        f"may be slower; {remedy}"
    ]


def llama_cpp_fault(config: Mapping[str, Any]) -> str:
    """Why llama.cpp cannot run a carve with this config.json; empty if it can."""
    target = MOE_TARGETS[config["model_type"]]
    if "llama.cpp" not in target.runtimes:
        return f"llama.cpp knows no {target.architecture}"
    if target.llama_cpp_equal_heads and config["num_key_value_heads"] != config["num_attention_heads"]:
        return f"llama.cpp gives {target.architecture} as many key heads as query heads, this model has fewer"
    if dense := config.get("mlp_only_layers"):
        return f"llama.cpp wants experts in every layer of {target.architecture}, and layers {dense} have none"
    fault = target.faults(MoEShape(2, 1, 1, 0), config).get("llama.cpp")
    return f"llama.cpp {fault}" if fault else ""


def _alternative(config: Mapping[str, Any]) -> str:
    """The remedy: another target of the same dense family that llama.cpp runs, or another runtime."""
    if config.get("mlp_only_layers"):
        return "carve with dense_layers=[]"
    dense = config.get("dense") or {"flex_olmo": {"model_type": "olmo2"}, "dots1": {"model_type": "qwen3"}}.get(
        config["model_type"], {}
    )
    if rope_type_of(config) == "llama3":
        return "carve with assemble.target=mixtral always_on=0, or serve it by transformers or vLLM"
    if config.get("topology") == "global_pool":
        return "carve with topology=per_layer: in llama.cpp no experts are shared by layers"
    shared = config.get("shared_intermediate_size") or config.get("n_shared_experts") or 0
    shape, source = MoEShape(2, 1, 1, int(shared)), {**config, **dense}
    for target in targets_of(dense.get("model_type", ""), shape.always_on):
        fits = "hidden_size" not in dense or not check_target(dense, target, shape)
        if "llama.cpp" in target.served_by(shape, source) and target.model_type != config["model_type"] and fits:
            return f"carve with assemble.target={target.model_type}"
    served = MOE_TARGETS[config["model_type"]].served_by(shape, source)
    return "serve it by transformers" + (" or vLLM" if "vLLM" in served else "")


def write_gguf(checkpoint: Path, out: Path, outtype: str, clients: Clients) -> None:
    """Convert a dense or carved checkpoint; `out` appears only when it is complete.

    Raises ConfigError: a part of llama.cpp is missing or too old; UserError: the disk is full, or llama.cpp fails.
    """
    steps = [outtype] if outtype in CONVERTED else ["bf16", outtype]
    weights = sum(prod(entry.shape) for entry in read_checkpoint(checkpoint).values())
    expected = int(weights * sum(CONVERTED.get(step, 0.9) for step in steps))
    if expected > (free := free_bytes(out.parent)):
        what = f"no room for the file: about {in_mib(expected)} wanted, {in_mib(free)} free"
        raise UserError(what, where=str(out.parent), do="free some space, or name a file on another disk")
    converter, python = _find_converter(clients)
    quantiser = None if outtype in CONVERTED else _find(clients, "llama_cpp")
    try:
        with TemporaryDirectory(dir=out.parent, prefix=".gguf-") as scratch, TemporaryDirectory() as links:
            readable, whole = Path(links) / checkpoint.resolve().name, Path(scratch) / "converted.gguf"
            _respell(checkpoint, readable)
            request = {"llama_cpp": str(converter), "checkpoint": str(readable), "out": str(whole)}
            run_client(python, "convert", request | {"outtype": steps[0]})
            if quantiser:
                smaller = Path(scratch) / "quantised.gguf"
                request = {"source": str(whole), "out": str(smaller), "outtype": outtype}
                run_client(quantiser, "quantise", request | {"threads": os.cpu_count() or 1})
                whole = smaller
            whole.rename(out)
    except OSError as error:
        do = "free some space there, or name a file in another folder"
        raise explain_os_error(error, where="gguf", folder=out.parent, do=do) or error from error


def active_bytes(file: Path, clients: Clients) -> float:
    """Bytes of a GGUF file's weights that one generated token reads. Raises ConfigError, as `write_gguf` does."""
    converter, python = _find_converter(clients)
    bytes_read: float = run_client(python, "active bytes", {"llama_cpp": str(converter), "file": str(file)})["bytes"]
    return bytes_read


def _respell(checkpoint: Path, folder: Path) -> None:
    """Link the checkpoint into `folder`, with tokenizer settings rewritten so that transformers 4.57 reads them."""
    from models.emit import respell_tokenizer  # noqa: PLC0415 - imports torch, which is slow

    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.is_file() and file.name != "tokenizer_config.json":
            (folder / file.name).symlink_to(file.resolve())
    if (settings := checkpoint / "tokenizer_config.json").is_file():
        text = json.dumps(respell_tokenizer(json.loads(settings.read_text(encoding="utf-8"))))
        (folder / settings.name).write_text(text, encoding="utf-8")


def _find_converter(clients: Clients) -> tuple[Path, Path]:
    folder = clients.llama_cpp
    if folder is None or not (folder / "convert_hf_to_gguf.py").is_file():
        what = f"no llama.cpp in {folder}" if folder else "llama.cpp's converter is in no package: its source is needed"
        raise ConfigError(what, where="--llama-cpp", do=INSTALL["converter"])
    if not (folder / "conversion" / "base.py").is_file():
        what = "this llama.cpp is too old: its converter has no folder conversion"
        raise ConfigError(what, where=str(folder), do=INSTALL["converter"])
    return folder, _find(clients, "sentencepiece")


def _find(clients: Clients, module: str) -> Path:
    if python := clients.holding(module):
        return python
    do = f"{INSTALL[module]}, or --python PATH of an interpreter that has it"
    raise ConfigError(f"no interpreter has {module}", where=", ".join(map(str, clients.pythons)), do=do)


def run_client(python: Path, step: str, request: Mapping[str, Any], **environment: str) -> dict[str, Any]:
    """Run a step of `client_process.py` in an interpreter. Raises UserError with the last line of its output."""
    script = Path(__file__).with_name("client_process.py")
    with TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        # The client must not import packages of this project's environment.
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [python, script, step, asked, answered],
            capture_output=True, text=True, check=False, env=inherited | {"HF_HUB_OFFLINE": "1"} | environment,
        )  # fmt: skip
        if done.returncode or not answered.exists():
            if done.returncode == -signal.SIGKILL:
                what = f"{step} was killed, most likely for lack of memory"
                raise UserError(what, where=str(python), do="free some memory, or use a larger machine")
            said = [line for line in (done.stderr.strip() or done.stdout.strip()).splitlines() if line.strip()]
            raise UserError(f"{step} failed: {said[-1] if said else 'it printed nothing'}", where=str(python))
        result: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
        return result


if __name__ == "__main__":
    sys.exit(main())
