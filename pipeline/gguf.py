"""`python -m pipeline gguf CHECKPOINT OUT.gguf`: writes a carve as GGUF with llama.cpp's converter and quantiser."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from instruments.errors import CheckpointError, ConfigError, check_output, exit_code, say
from models.checkpoint.folder import read_checkpoint
from models.config import setting_word
from models.source import explained_config, read_config
from models.targets.base import rope_type_of
from models.targets.config import carved_target, target_of, text_of
from pipeline.clients import Clients, readable_copy, run_client
from pipeline.disk import explain_os_error
from stages.artifacts.rendering import in_mib

# Types that the converter writes, and those of the quantiser.
CONVERTED = ("f32", "f16", "bf16", "q8_0")
QUANTISED = ("q4_0", "q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k")
# The remedy for a carve that llama.cpp cannot run.
OTHERS = "another assemble.target, see models/README.md (Runtimes), or serve it by transformers"
INSTALL = (
    "pip install llama-cpp-python sentencepiece, and the source, since no package has the converter: pip download "
    "--no-deps --no-binary :all: llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz, then --llama-cpp "
    "llama_cpp_python-*/vendor/llama.cpp (and --python PATH of another interpreter that has the packages)"
)


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the checkpoint or llama.cpp fails, 2 wrong command line or missing programs."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline gguf", description="Write a carve as a GGUF file with llama.cpp's own programs."
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a carve")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    types = [*CONVERTED, *QUANTISED]
    parser.add_argument("--type", default="q8_0", choices=types, help=f"{', '.join(types)}; default q8_0")
    Clients.add_options(parser)
    wanted = parser.parse_args(words)

    def work() -> None:
        with explained_config(wanted.checkpoint):
            check_carve(wanted.checkpoint)
            for note in check_convertible(read_config(wanted.checkpoint)):
                say(f"{note}\n")
        check_tokenizer(wanted.checkpoint)
        check_range(wanted.checkpoint, wanted.type)
        check_output(wanted.out)
        if wanted.out.exists():
            raise ConfigError(f"{wanted.out} exists already", where="command line", do="name another output file")
        clients = Clients.of(wanted)
        write_gguf(wanted.checkpoint, wanted.out, wanted.type, clients)
        say(f"{in_mib(wanted.out.stat().st_size)} in {wanted.out}: {describe_types(wanted.out, clients)}\n")

    return exit_code(work)


def check_carve(folder: Path) -> None:
    """Raises CheckpointError: no checkpoint, or its architecture is none of the MoE targets."""
    config = read_config(folder)
    model_type, carved = config.get("model_type"), carved_target(config)
    if carved is None:
        do = f"python -m pipeline model=local {setting_word('model.path', str(folder))}"
        inside = f" with a text part of type {text_of(config).get('model_type')}" * ("text_config" in config)
        raise CheckpointError(f"{model_type}{inside} is no architecture that a carve becomes", where=str(folder), do=do)
    target, architecture = carved
    if (named := config.get("architectures", [architecture])) != [architecture]:  # converters choose their code by it
        do = f'"architectures": ["{architecture}"] in config.json, as in the carve'
        raise CheckpointError(f"{model_type} with architectures {named}", where=str(folder), do=do)
    entries, hidden = read_checkpoint(folder), text_of(config).get("hidden_size")
    if target.transposed and any(
        name.endswith("experts.gate_up_proj") and entry.shape[1] != hidden for name, entry in entries.items()
    ):
        turned = "{name: t.mT.contiguous() if name.endswith('_proj') else t for name, t in model.state_dict().items()}"
        do = f"model.save_pretrained(folder, save_original_format=False, state_dict={turned})"
        what = "save_pretrained of transformers wrote the experts as other programs do not read them: transposed"
        raise CheckpointError(what, where=str(folder), do=do)


def check_tokenizer(folder: Path) -> None:
    """Raises CheckpointError: there is no tokenizer, which `save_pretrained` of a model does not write."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        do = "copy the tokenizer from the carve that was trained (stages/train/RECIPES.md has the command)"
        raise CheckpointError("no tokenizer, which llama.cpp and serve_check need", where=str(folder), do=do)


def check_range(folder: Path, outtype: str) -> None:
    """Raises ConfigError: this type makes the always-on neurons 0, as Gemma 4 holds them, scaled by 2⁻³⁰."""
    target, architecture = target_of(read_config(folder))
    if target.output_scale >= 1 or outtype in {"f32", "bf16"}:  # the others hold numbers, or their scales, in float16
        return
    from models.checkpoint.shards import ShardReader  # noqa: PLC0415 - imports torch

    with ShardReader(folder) as reader:
        downs = (reader.tensor(name) for name in reader.names if name.endswith(".mlp.down_proj.weight"))
        if any(0 < float(down_DS.abs().max()) < 2**-24 for down_DS in downs):
            what = f"{outtype} makes the always-on neurons 0: their down projections are below the range of float16"
            raise ConfigError(what, where=f"architecture {architecture}", do="--type bf16, or a carve with always_on=0")


def check_convertible(config: Mapping[str, Any]) -> list[str]:
    """Notes on differences between llama.cpp and the carve. Raises ConfigError: llama.cpp cannot run the carve."""
    target, architecture = target_of(config)
    if fault := llama_cpp_fault(config):
        raise ConfigError(fault, where=f"architecture {architecture}", do=OTHERS)
    text = text_of(config)
    window, longest = text.get("sliding_window"), text.get("max_position_embeddings", 0)
    limits = {}
    windows = (target.sliding_window or target.layer_windows) and not target.llama_cpp_windows
    if windows and window and window < longest:
        limits["sliding window"] = window
    if rope_type_of(text) == "dynamic":
        limits["dynamic position encoding"] = longest
    name = target.architecture.removesuffix("ForCausalLM")
    notes = [
        f"llama.cpp gives {name} no {feature}: texts of up to {tokens:,} tokens are right (-c {tokens})"
        for feature, tokens in limits.items()
    ]
    images = "the GGUF file holds the text part, without the images': convert_hf_to_gguf.py --mmproj writes that"
    return [*notes, *([] if text is config else [images])]


def llama_cpp_fault(config: Mapping[str, Any]) -> str:
    """Why llama.cpp cannot run a carve with this config.json; empty if it can."""
    target, architecture = target_of(config)
    config = text_of(config)
    if "llama.cpp" not in target.runtimes:
        return f"llama.cpp knows no {architecture}"
    fault = target.faults(config).get("llama.cpp")
    return f"llama.cpp {fault}" if fault else ""


def write_gguf(checkpoint: Path, out: Path, outtype: str, clients: Clients) -> None:
    """Convert a carve; `out` appears only when it is complete.

    Raises ConfigError: a part of llama.cpp is missing or too old; UserError: the disk is full, or llama.cpp fails.
    """
    converter, python = _find_converter(clients)
    quantiser = None if outtype in CONVERTED else _find(clients, "llama_cpp")
    try:
        with (
            readable_copy(checkpoint, respell=True) as readable,
            TemporaryDirectory(dir=out.parent, prefix=".gguf-") as scratch,
        ):
            whole = Path(scratch) / "converted.gguf"
            config = read_config(checkpoint)
            head = config["tie_word_embeddings"] and "llama.cpp" in target_of(config)[0].needs_head
            request = {"llama_cpp": str(converter), "checkpoint": str(readable), "out": str(whole), "head": head}
            run_client(python, "convert", request | {"outtype": "bf16" if quantiser else outtype})
            if quantiser:
                smaller = Path(scratch) / "quantised.gguf"
                request = {"source": str(whole), "out": str(smaller), "outtype": outtype}
                run_client(quantiser, "quantise", request | {"threads": os.cpu_count() or 1})
                whole = smaller
            whole.rename(out)
    except OSError as error:
        do = "free some space there, or name a file in another folder"
        raise explain_os_error(error, where="gguf", folder=out.parent, do=do) or error from error


def describe_types(file: Path, clients: Clients) -> str:
    """Bits per weight of a GGUF file's tensors, and the share of weights in each type: rows may not fit a type."""
    converter, python = _find_converter(clients)
    found = run_client(python, "count", {"llama_cpp": str(converter), "file": str(file)})
    weights, size = (sum(column) for column in zip(*found.values(), strict=True))
    shares = sorted(((count / weights, name) for name, (count, _) in found.items()), reverse=True)
    return f"{8 * size / weights:.2f} bits per weight; " + ", ".join(f"{name} {share:.1%}" for share, name in shares)


def _find_converter(clients: Clients) -> tuple[Path, Path]:
    folder = clients.llama_cpp
    if folder is None or not (folder / "conversion" / "base.py").is_file():
        what = "llama.cpp's converter is missing: its source is needed, of a version with a folder conversion"
        raise ConfigError(what, where=f"--llama-cpp {folder}", do=INSTALL)
    return folder, _find(clients, "sentencepiece")


def _find(clients: Clients, client: str) -> Path:
    if python := clients.holding(client):
        return python
    raise ConfigError(f"no interpreter has {client}", where=", ".join(map(str, clients.found)), do=INSTALL)
