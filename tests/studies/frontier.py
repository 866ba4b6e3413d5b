"""Where carves are on the frontier: loss over the bytes that a token reads, compared with dense models of fewer bits.

PYTHONPATH=.:tests python -m studies.frontier OUTPUT --carve half=CHECKPOINT --scan SCAN --llama-cpp DIR --python BIN

Writes static masks of the embedded model (the neurons that contribute most in a scan's result, down columns aligned),
quantises dense model, masks and carves with llama.cpp, and measures them there on held-out text. Without --python
it only prints bytes for the shapes of larger models.
"""

import argparse
import json
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np

if "--measure" not in sys.argv:  # which runs in llama.cpp's interpreter, without this project
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from models.ffn import DenseFFN
    from models.loading import load_tokenizer, padding_id
    from models.source import EMBEDDED
    from models.stream import LayerStream
    from pipeline.clients import Clients, run_client
    from pipeline.gguf import write_gguf
    from stages.artifacts.carve import NeuronStatistics
    from stages.calibration.alignment import align_down
    from stages.calibration.batches import TokenStream
    from stages.evaluate.baselines import CarvedFFN
    from stages.losses import MeanLoss
    from stages.project.config import ProjectConfig
    from stages.text.batches import batch_sequences
    from stages.text.config import DataConfig
    from stages.text.sequences import load_text

DENSE_TYPES, OTHER_TYPES = ("f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k"), ("f16", "q8_0", "q4_k_m")
COLUMNS = ("model", "type", "bits/weight", "read, MiB/token", "resident, MiB", "gap", "±", "KL")
LENGTH = 256
# Layers, hidden size, FFN width, heads, key heads, head size, vocabulary; bits per weight where all rows fit the types.
SHAPES = {"Qwen2.5-7B": (28, 3584, 18944, 28, 4, 128, 152064), "Gemma-3-27B": (62, 5376, 21504, 32, 16, 128, 262208)}
BITS = {"f16": 16, "q8_0": 8.5, "q6_k": 6.56, "q5_k_m": 5.7, "q4_k_m": 4.85, "q3_k_m": 3.91, "q2_k": 3.0}


def shape_rows():
    """GB that a token reads by model and type: dense, with three quarters of the FFN, and with half of it."""
    for name, (layers, hidden, width, heads, keys, size, vocabulary) in SHAPES.items():
        around = layers * hidden * size * 2 * (heads + keys) + vocabulary * hidden
        for share in (1, 0.75, 0.5):
            weights = around + layers * 3 * hidden * width * share
            yield [name, f"{share:.0%}", *(f"{weights * bits / 8e9:.2f}" for bits in BITS.values())]


def measure(request):
    """In llama.cpp's interpreter: loss and KL(dense ‖ model) of each sequence, and weights and bytes of each tensor."""
    import llama_cpp

    sys.path.insert(0, f"{request['llama_cpp']}/gguf-py")
    from gguf import GGUFReader

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(request["file"].encode(), llama_cpp.llama_model_default_params())
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = LENGTH
    settings.n_threads = settings.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, settings)
    memory = llama_cpp.llama_get_memory(context)
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(LENGTH, 0, 1)
    dense_STV, sums, kept = None if request["first"] else np.load(request["dense"], mmap_mode="r"), [], []
    for number, ids in enumerate(np.load(request["ids"]).tolist()):
        llama_cpp.llama_memory_clear(memory, True)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, True
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode fails")
        rows = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (size,)) for i in range(LENGTH - 1)]
        logits_TV = np.array(rows, dtype=np.float64)
        logits_TV -= logits_TV.max(1, keepdims=True)
        logits_TV -= np.log(np.exp(logits_TV).sum(1, keepdims=True))
        dense_TV = logits_TV if dense_STV is None else np.float64(dense_STV[number])
        distance = (np.exp(dense_TV) * (dense_TV - logits_TV)).sum()
        sums.append((float(-logits_TV[np.arange(LENGTH - 1), ids[1:]].sum()), float(distance)))
        if dense_STV is None:
            kept.append(logits_TV.astype(np.float32))
    if kept:
        np.save(request["dense"], np.stack(kept))
    tensors = GGUFReader(request["file"]).tensors
    return {"sums": sums, "tensors": {each.name: (int(each.n_elements), int(each.n_bytes)) for each in tensors}}


def token_bytes(tensors, share):
    """Bytes that one generated token reads: of experts the chosen share; of an input embedding only one row."""
    looked_up = {"token_embd.weight"} if "output.weight" in tensors else set()
    sizes = {name: size for name, (_, size) in tensors.items() if name not in looked_up}
    return sum(size * (share if re.search(r"_exps\.", name) else 1) for name, size in sizes.items())


def write_mask(folder, dense, scan, width):
    """The dense model with the `width` neurons of each FFN that contribute most, and aligned down columns."""

    tokenizer = load_tokenizer(dense, trust_remote_code=False)
    batches = batch_sequences(load_text(DataConfig(), tokenizer, "calibration").sequences, 4096, padding_id(tokenizer))
    contribution_LF = NeuronStatistics.load(scan).contribution
    weights = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).state_dict()
    with LayerStream(dense, device=torch.device("cpu")) as stream, torch.no_grad():
        tokens = TokenStream(stream, batches)
        for index, layer in enumerate(stream.layers()):
            tokens.enter(layer)
            kept, ffn = contribution_LF[index].topk(width).indices.sort().values, layer.ffn
            narrow = DenseFFN(ffn.gate_FD[kept], ffn.up_FD[kept], ffn.down_DF[:, kept], ffn.act)
            carved, wanted = CarvedFFN(narrow.hidden, narrow.down_DF), [ffn(x_TD) for x_TD in tokens.inputs]
            aligned = align_down(carved, tokens.inputs, wanted, ProjectConfig()).carved
            tokens.leave(map(aligned, tokens.inputs))
            parts = {"gate_proj": narrow.gate_FD, "up_proj": narrow.up_FD, "down_proj": aligned.down_DF}
            weights |= {f"model.layers.{index}.mlp.{name}.weight": value for name, value in parts.items()}
    config = AutoConfig.from_pretrained(dense, intermediate_size=width)
    mask = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mask.load_state_dict(weights)
    mask.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_ids(file, text, count):
    """Whole sequences of a text, evenly spaced over it."""
    data = DataConfig(heldout_path=text, heldout_tokens=10**6, max_length=LENGTH)
    sequences = load_text(data, load_tokenizer(EMBEDDED, trust_remote_code=False), "heldout").sequences
    whole = [sequence.ids for sequence in sequences if len(sequence.ids) == LENGTH]
    places = np.linspace(0, len(whole) - 1, min(count, len(whole))).astype(int)
    np.save(file, np.array([whole[place] for place in places], dtype=np.int32))


def convert(folder, file, kind, clients, python):
    """Write a model's file of this type, in two steps as for a carve, if it is missing."""
    source = file.with_name(file.name.replace(kind, "f32"))
    if not source.exists():
        if "num_experts_per_tok" in json.loads((folder / "config.json").read_text()):
            write_gguf(folder, source, "f32", clients)
        else:
            asked = {"llama_cpp": str(clients.llama_cpp), "checkpoint": str(folder), "out": str(source), "head": False}
            run_client(python, "convert", asked | {"outtype": "f32"})
    if not file.exists():
        run_client(python, "quantise", {"source": str(source), "out": str(file), "outtype": kind, "threads": 1})


def study(wanted):
    """A row for each model and type."""
    out, clients, (python,) = wanted.output, Clients.of(wanted), wanted.python
    out.mkdir(parents=True, exist_ok=True)
    write_ids(out / "ids.npy", wanted.text, wanted.sequences)
    carves = {name: Path(folder) for name, _, folder in (word.partition("=") for word in wanted.carve)}
    masks, reference = {name: out / name for name in ("mask768", "mask512")}, None
    for name, folder in ({"dense": EMBEDDED} | masks | carves).items():
        if not folder.exists():
            write_mask(folder, EMBEDDED, wanted.scan, int(name.removeprefix("mask")))
        config = json.loads((folder / "config.json").read_text())
        experts = config.get("n_routed_experts") or config.get("num_experts") or 1
        share = config.get("num_experts_per_tok", 1) / experts
        for kind in ("f32", *DENSE_TYPES) if name == "dense" else OTHER_TYPES:
            file = out / f"{name}-{kind}.gguf"
            convert(folder, file, kind, clients, python)
            request = {"llama_cpp": str(clients.llama_cpp), "file": str(file), "ids": str(out / "ids.npy")}
            request |= {"dense": str(out / "dense.npy"), "first": reference is None}
            done = subprocess.run([python, __file__, "--measure", json.dumps(request)], capture_output=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            losses, distances = zip(*found["sums"], strict=True)
            tokens, counted = len(losses) * (LENGTH - 1), tuple((loss, LENGTH - 1) for loss in losses)
            loss = MeanLoss(sum(losses), tokens, divergence=sum(distances) / tokens, sequences=counted)
            reference = reference or loss
            weights, size = (sum(column) for column in zip(*found["tensors"].values(), strict=True))
            sizes = (8 * size / weights, token_bytes(found["tensors"], share) / 2**20, size / 2**20)
            gaps = loss.nats - reference.nats, loss.gap_error(reference), loss.divergence
            yield [name, kind, *(f"{figure:.2f}" for figure in sizes), *(f"{figure:.4f}" for figure in gaps)]


def main():

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--carve", nargs="*", default=[], metavar="NAME=CHECKPOINT")
    parser.add_argument("--scan", type=Path, help="folder of a result of stage=scan")
    parser.add_argument("--text", help="default: held-out modules of the standard library")
    parser.add_argument("--sequences", type=int, default=64)
    Clients.add_options(parser)
    wanted = parser.parse_args()
    rows = chain([COLUMNS], study(wanted)) if wanted.python else chain([("GB/token", "active", *BITS)], shape_rows())
    for row in rows:
        print(*row, sep=" | ", flush=True)  # noqa: T201


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(json.loads(sys.argv[2]))))  # noqa: T201
    else:
        main()
