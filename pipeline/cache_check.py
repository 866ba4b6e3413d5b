"""`python -m pipeline cache_check CHECKPOINT --text FILE`: what a carve reads from slow memory, by size of a cache.

Attention, embeddings, always-on neurons and routers are in fast memory, experts in slow memory (RAM behind a GPU, or a
disk), and each layer has a cache of experts in fast memory. Bytes are counted, not timed.
"""

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int
from tabulate import tabulate

from instruments.errors import CheckpointError, ConfigError, exit_code, say
from instruments.safetensors_files import TensorEntry, read_header
from models.checkpoint.folder import list_shards
from models.source import read_config
from models.targets.config import target_of, text_of
from pipeline.compare import LENGTH, read_text
from pipeline.generate import add_limits
from pipeline.gguf import check_carve
from stages.artifacts.rendering import in_mib

COLUMNS = ("experts cached", "fast memory", "hits", "read", "read, dense", "dense ÷ carve")


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the checkpoint or the text cannot be read, 2 wrong command line."""
    told = "Count the bytes of experts that a carve reads from slow memory for each token of a text."
    parser = argparse.ArgumentParser(prog="python -m pipeline cache_check", description=told)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a carve")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="text, or a folder of it")
    parser.add_argument("--dense", type=Path, metavar="FOLDER", help="the dense model, to compare with")
    parser.add_argument("--cached", metavar="C,...", help="experts per layer in the cache; default: some sizes")
    add_limits(parser, tokens=8192)
    wanted = parser.parse_args(words)

    def work() -> None:
        check_carve(wanted.checkpoint)
        ffn = ffn_bytes(wanted.checkpoint, wanted.dense)
        trace = trace_routing(wanted.checkpoint, wanted.text, wanted.tokens, wanted.device)
        say(render(trace, ffn, trace.cache_sizes(wanted.cached)))

    return exit_code(work)


@dataclass(frozen=True)
class Trace:
    """The experts that each cache is asked for: of one layer, or of all layers if they share a pool."""

    chosen: Int[np.ndarray, "C T K"]
    experts: int
    passes: int  # of layers per token through one cache

    def cache_sizes(self, asked: str | None) -> list[int]:
        """The sizes in `asked`, or some. Raises ConfigError: a size is no number, too small or too large."""
        least, most = self.chosen.shape[2], self.experts
        if asked is None:
            return sorted({0, least, *(max(least, round(most * share)) for share in (0.25, 0.5, 0.75)), most})
        parts = asked.split(",")
        if wrong := [part for part in parts if not part.isdecimal() or 0 < int(part) < least or int(part) > most]:
            what = f"no cache of {', '.join(wrong)} experts: a layer has {most} and a token needs {least}"
            raise ConfigError(what, where="--cached", do=f"--cached 0,{least},{most}, or leave it out")
        return sorted({int(part) for part in parts})

    def hits(self, sizes: Sequence[int]) -> list[float]:
        """Hit rates of an LRU cache, for each size, on the second half of the text; the first half fills it."""
        half = self.chosen.shape[1] // 2
        ranks = np.stack([recency_ranks(chosen_TK, self.experts)[half:] for chosen_TK in self.chosen])
        return [float((ranks < size).mean()) for size in sizes]


def recency_ranks(chosen_TK: Int[np.ndarray, "T K"], experts: int) -> Int[np.ndarray, "T K"]:
    """How many experts were used after this one's last use, before the token; E for one that was never used.

    An LRU cache of C experts, which serves all K of a token at once and then holds them, has it if this is below C.
    """
    tokens, top_k = chosen_TK.shape
    # Time of every expert's last use up to each token; of one token's experts, the first counts as the latest.
    used_TE = np.full((tokens + 1, experts), -1)
    times_TK = np.arange(tokens)[:, None] * top_k + np.arange(top_k)[::-1]
    np.put_along_axis(used_TE[1:], chosen_TK, times_TK, axis=1)
    before_TE = np.maximum.accumulate(used_TE, axis=0)[:-1]
    own_TK = np.take_along_axis(before_TE, chosen_TK, axis=1)
    ranks_TK = np.stack([(before_TE > own_TK[:, place, None]).sum(1) for place in range(top_k)], axis=1)
    return np.where(own_TK < 0, experts, ranks_TK)


def trace_routing(checkpoint: Path, text: Path, tokens: int, device: str) -> Trace:
    """Run the carve on the beginning of a text, sequence by sequence. Raises UserError."""
    import torch  # noqa: PLC0415 - slow, as are the others, and the help page does not need them

    from models.loading import input_device, load_tokenizer  # noqa: PLC0415
    from models.training import RouterWatch  # noqa: PLC0415
    from pipeline.greedy import open_writer  # noqa: PLC0415

    sequences = read_text(text, load_tokenizer(checkpoint, trust_remote_code=False), tokens, LENGTH)
    chosen = []
    with open_writer(checkpoint, device) as writer, torch.no_grad(), RouterWatch(writer.model).collect() as routings:
        for sequence in sequences:
            ids_1T = torch.tensor([sequence.ids], device=input_device(writer.model))
            writer.model(input_ids=ids_1T, use_cache=False, logits_to_keep=1)
            chosen.append(np.stack([routing.chosen_TK.cpu().numpy() for routing in routings]))
            layers, experts = len(routings), routings[0].logits_TE.shape[1]
            routings.clear()
    chosen_LTK = np.concatenate(chosen, axis=1)
    if read_config(checkpoint).get("topology") == "global_pool":  # one cache, which layer after layer asks
        return Trace(chosen_LTK.swapaxes(0, 1).reshape(1, -1, chosen_LTK.shape[2]), experts, layers)
    return Trace(chosen_LTK, experts, 1)


def ffn_bytes(checkpoint: Path, dense: Path | None) -> tuple[int, int, int, str]:
    """Bytes of all experts in a carve's files, of its other FFN weights, of the dense model's FFNs, and the format.

    The dense model's (0: not named) are counted in the experts' number format; a carve may hold copies of neurons.
    Raises CheckpointError: no layer is carved, or the dense model cannot be read; ConfigError: it has another size.
    """
    target = target_of(read_config(checkpoint))[0]

    def find(*templates: str) -> list[TensorEntry]:
        """The tensors of these names, also within a wrapper, of any layer and expert."""
        named = {each.replace("{part}", part).removeprefix("model.") for each in templates for part in target.parts}
        numbered = "|".join(re.escape(re.sub(r"\{\w+\}", "0", name)).replace("0", r"\d+") for name in named)
        return [entry for name, entry in found.items() if re.search(rf"(?:^|\.)(?:{numbered})$", name)]

    shards = [path for path in list_shards(checkpoint) if path.suffix == ".safetensors"]
    found = {name: entry for shard in shards for name, entry in read_header(shard).items()}
    routed = find(target.experts, *(target.packed or ()), *(target.packed_pool or ()))
    if not routed:
        raise CheckpointError("no layer has experts", where=str(checkpoint), do="name a carve")
    others = find(target.dense, *filter(None, [target.shared, *(target.packed_shared or ())]))
    numbers = 0
    if dense:
        from models.checkpoint.shards import DenseReader  # noqa: PLC0415 - imports torch

        own, given = (text_of(read_config(folder)) for folder in (checkpoint, dense))
        for name in sorted({"hidden_size", "num_hidden_layers"} & own.keys() & given.keys()):
            if own[name] != given[name]:
                what = f"this is not the dense model of the carve: its {name} is {given[name]}, not {own[name]}"
                raise ConfigError(what, where=f"--dense {dense}", do="name the model that was carved")
        with DenseReader(dense) as reader:
            decoder = reader.decoder
            layers, matrices = decoder.depth - decoder.lacking, 2 + decoder.ffn.is_gated
            numbers = round(layers * matrices * decoder.hidden * decoder.width)
    whole = numbers * routed[0].nbytes // math.prod(routed[0].shape)
    return sum(entry.nbytes for entry in routed), sum(entry.nbytes for entry in others), whole, routed[0].dtype


def render(trace: Trace, ffn: tuple[int, int, int, str], sizes: Sequence[int]) -> str:
    """The table, one row for each size of the cache; `ffn`: see `ffn_bytes`."""
    (routed, others, whole, dtype), (caches, requests, top_k) = ffn, trace.chosen.shape
    expert, rows = routed / (caches * trace.experts), []
    for size, hits in zip(sizes, trace.hits(sizes), strict=True):
        fast = others + caches * size * expert
        read = expert * caches * trace.passes * top_k * (1 - hits)
        dense = max(0, whole - fast)
        compared = [in_mib(round(dense)) if whole else "–", f"{dense / read:.2f}" if whole and read else "–"]
        rows.append([size, in_mib(round(fast)), f"{hits:.1%}", in_mib(round(read)), *compared])
    return (
        f"{tabulate(rows, COLUMNS, tablefmt='github', disable_numparse=True)}\n\n"
        f"{requests // trace.passes:,} tokens, hits of an LRU cache on the second half; read: bytes of FFN weights "
        f"({dtype}) per generated token from slow memory; fast memory: always-on neurons and caches; dense: the dense "
        "model with as many bytes of its FFNs there (--dense)\n"
    )
