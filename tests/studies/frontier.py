"""Where carves are on the frontier: loss over the bytes that a token reads, compared with dense models of fewer bits.

PYTHONPATH=.:tests python -m studies.frontier OUTPUT --dense MODEL --text wiki=FILE chats=FILE --scan SCAN
--carve half=CHECKPOINT --llama-cpp DIR --python BIN

Writes static masks of the dense model (the neurons that contribute most in a scan's result, down columns aligned on
its text), quantises dense model, masks and carves with llama.cpp, measures them there, and adds a line to
OUTPUT/rows.jsonl for each. What is there is not measured again; --speed times it, --report shows it. Carves with dense
layers, which llama.cpp does not load, are measured in transformers, in fp32; their bytes are computed.
Without --python it only prints bytes for the shapes of larger models.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np

if "--client" not in sys.argv:  # which runs in llama.cpp's interpreter, without this project
    import torch
    from matplotlib.figure import Figure
    from safetensors.torch import save_file
    from tabulate import tabulate
    from transformers import AutoConfig, AutoModelForCausalLM

    from models.checkpoint.shards import ShardReader
    from models.ffn import DenseFFN
    from models.loading import load_tokenizer, padding_id
    from models.source import EMBEDDED, read_config
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
    from stages.text.config import DataConfig, SourceConfig
    from stages.text.sequences import load_text

DENSE_TYPES, OTHER_TYPES = ("f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k"), ("f16", "q8_0", "q4_k_m")
LENGTH, GENERATED, CONTEXT = 256, 32, 128
# Layers, hidden size, FFN width, heads, key heads, head size, vocabulary; bits per weight where all rows fit the types.
SHAPES = {"Qwen2.5-7B": (28, 3584, 18944, 28, 4, 128, 152064), "Gemma-3-27B": (62, 5376, 21504, 32, 16, 128, 262208)}
BITS = {"f16": 16, "q8_0": 8.5, "q6_k": 6.56, "q5_k_m": 5.7, "q4_k_m": 4.85, "q3_k_m": 3.91, "q2_k": 3.0}


def shape_rows():
    """GB that a token reads by model and type, with all of the FFN, three quarters and half; bits of dense equals."""
    for name, (layers, hidden, width, heads, keys, size, vocabulary) in SHAPES.items():
        around, ffn = layers * hidden * size * 2 * (heads + keys) + vocabulary * hidden, layers * 3 * hidden * width
        for share in (1, 0.75, 0.5):
            part = (around + ffn * share) / (around + ffn)
            cells = (f"{part * (around + ffn) * bits / 8e9:.2f} ({part * bits:.1f})" for bits in BITS.values())
            yield [name, f"{share:.0%}", *cells]


class Llama:
    """A GGUF file in llama.cpp, one thread; `feed` appends tokens to `start` others; logits of `every` but the last."""

    def __init__(self, file, longest, mapped=False):
        import llama_cpp

        self.api = llama_cpp
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_extra_bufts = not mapped  # which would hold weights in another order, in memory
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), parameters)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = longest
        settings.n_ubatch = min(512, longest)
        settings.n_threads = settings.n_threads_batch = 1
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(longest, 0, 1)

    def feed(self, ids, start=0, every=False):
        self.api.llama_memory_seq_rm(self.memory, 0, start, -1)
        batch = self.batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, start + i, 1, 0
            batch.logits[i] = every or i == len(ids) - 1
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode fails")
        rows = (self.api.llama_get_logits_ith(self.context, place) for place in range(len(ids) - 1))
        return (np.ctypeslib.as_array(row, (self.vocabulary,)) for row in rows) if every else ()


def compare(logits_of, texts, first, count):
    """Loss and KL(dense ‖ model) of `count` sequences of each text; the first model's predictions are kept."""
    sums = {}
    for text, (ids_file, dense_file) in texts.items():
        ids_ST, kept_STV = np.load(ids_file), None if first else np.load(dense_file, mmap_mode="r")
        for number, ids in list(enumerate(ids_ST.tolist()))[:: len(ids_ST) // count]:
            loss = distance = 0.0
            for place, logits_V in enumerate(logits_of(ids)):  # one row at a time stays in the cache
                found_V = logits_V - logits_V.max()
                found_V -= np.log(np.exp(found_V).sum(dtype=np.float64))
                if first:
                    shape = (len(ids_ST), LENGTH - 1, len(found_V))
                    if kept_STV is None:
                        kept_STV = np.lib.format.open_memmap(dense_file, mode="w+", dtype=np.float32, shape=shape)
                    kept_STV[number, place] = found_V
                dense_V = kept_STV[number, place]
                distance += float((np.exp(dense_V) * (dense_V - found_V)).sum(dtype=np.float64))
                loss -= float(found_V[ids[place + 1]])
            sums.setdefault(text, []).append((loss, distance))
    return sums


def measure(llama_cpp, file, texts, first, count):
    """In llama.cpp's interpreter: `compare`'s sums, and weights and bytes of each tensor."""
    sys.path.insert(0, f"{llama_cpp}/gguf-py")
    from gguf import GGUFReader

    model = Llama(file, LENGTH) if texts else None
    sums = compare(lambda ids: model.feed(ids, every=True), texts, first, count)
    return sums, {each.name: (int(each.n_elements), int(each.n_bytes)) for each in GGUFReader(file).tensors}


def time_files(files, ids, prompt, rounds):
    """In llama.cpp's interpreter: CPU seconds of prompt and per generated token by file and round, files in turn."""
    ids = np.resize(np.load(ids), prompt).tolist()
    models, found = {file: Llama(file, prompt + GENERATED) for file in files}, {file: [] for file in files}
    for _ in range(rounds):
        for file, model in models.items():
            began = time.process_time()
            model.feed(ids)
            between = time.process_time()
            for place in range(CONTEXT, CONTEXT + GENERATED):
                model.feed(ids[place : place + 1], start=place)
            found[file].append((between - began, (time.process_time() - between) / GENERATED))
    return found


def generate(file, ids, group):
    """In llama.cpp's interpreter, a file mapped in a memory cgroup: seconds and MiB from disk per generated token."""
    with Path(file).open("rb") as stream:  # pages that are in memory already count for the process that read them
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    ids, model, marks = np.load(ids)[0].tolist(), Llama(file, LENGTH, mapped=True), []
    for place in range(GENERATED + 1):
        model.feed(ids[place : place + 1], start=place)
        if place in (GENERATED // 2, GENERATED):
            read = int(Path("/proc/self/io").read_text().partition("\nread_bytes: ")[2].split()[0])
            marks.append(np.array([time.perf_counter(), read / 2**20]))
    return ((marks[1] - marks[0]) / (GENERATED - GENERATED // 2)).tolist()


@contextmanager
def memory_group(limit):
    """A memory cgroup (v1) of `limit` MiB inside this process's own."""
    (own,) = (line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    group = Path(f"/sys/fs/cgroup/memory{own}") / f"frontier{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(f"{limit}M")
        yield group
    finally:
        group.rmdir()


def in_client(python, step, **request):
    """Run `measure`, `time_files` or `generate` in llama.cpp's interpreter."""
    words = [python, __file__, "--client", step, json.dumps(request, default=str)]
    return json.loads(subprocess.run(words, capture_output=True, check=True).stdout.splitlines()[-1])


def token_bytes(tensors, share):
    """Bytes that one generated token reads: of experts the chosen share; of an input embedding only one row."""
    looked_up = {"token_embd.weight"} if "output.weight" in tensors else set()
    sizes = {name: size for name, (_, size) in tensors.items() if name not in looked_up}
    return sum(size * (share if re.search(r"_exps\.", name) else 1) for name, size in sizes.items())


def scanned_text(scan, tokens):
    """The settings of the text that a scan has read."""
    settings = json.loads((scan / "manifest.json").read_text())["recipe"]["settings"]["data"]
    sources = [SourceConfig(**source) for source in settings.get("sources", [])]
    return DataConfig(**settings | {"sources": sources, "tokens": tokens})


def write_mask(folder, dense, scan, width, data=None):
    """The dense model with the `width` neurons of each FFN that contribute most, and aligned down columns."""
    tokenizer = load_tokenizer(dense, trust_remote_code=False)
    text = load_text(data or DataConfig(), tokenizer, "calibration")
    batches = batch_sequences(text.sequences, 4096, padding_id(tokenizer))
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


def write_ids(file, dense, text, count):
    """Whole sequences of a text, evenly spaced over it; chats by the model's template."""
    data = DataConfig(heldout_path=text or None, heldout_tokens=10**6, max_length=LENGTH)
    sequences = load_text(data, load_tokenizer(dense, trust_remote_code=False), "heldout").sequences
    whole = [sequence.ids for sequence in sequences if len(sequence.ids) == LENGTH]
    places = np.linspace(0, len(whole) - 1, min(count, len(whole))).astype(int)
    np.save(file, np.array([whole[place] for place in places], dtype=np.int32))


def ffn_layer(name):
    """The layer of an FFN's tensor in a checkpoint or in a GGUF file; None for other tensors."""
    found = re.match(r"(?:model\.layers|blk)\.(\d+)\.(?:mlp\.|ffn_(?!norm))", name)
    return found and int(found[1])


def fill_dense_layers(folder, checkpoint):
    """Write a carve whose dense layers have another layer's experts, so that llama.cpp quantises it; for its sizes."""
    config = read_config(checkpoint)
    dense = config["mlp_only_layers"]
    donor = next(layer for layer in range(config["num_hidden_layers"]) if layer not in dense)
    with ShardReader(checkpoint) as reader:
        kept = {name: reader.tensor(name) for name in reader.names if ffn_layer(name) not in dense}
    given = [name for name in kept if ffn_layer(name) == donor]
    kept |= {name.replace(f".{donor}.", f".{layer}.", 1): kept[name].clone() for layer in dense for name in given}
    folder.mkdir(exist_ok=True)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"mlp_only_layers": []}))
    for file in checkpoint.glob("*token*"):
        shutil.copyfile(file, folder / file.name)


def convert(folder, file, name, kind, clients, python):
    """Write a model's file of this type, in two steps as for a carve, if it is missing."""
    source = file.with_name(f"{name}-{'f32' if name == 'dense' else 'bf16'}.gguf")
    if not source.exists() and not file.exists():
        if "num_experts_per_tok" in read_config(folder):
            write_gguf(folder, source, "bf16", clients)
        else:
            asked = {"llama_cpp": str(clients.llama_cpp), "checkpoint": str(folder), "out": str(source), "head": False}
            run_client(python, "convert", asked | {"outtype": source.stem.partition("-")[2]})
    if not file.exists():
        run_client(python, "quantise", {"source": str(source), "out": str(file), "outtype": kind, "threads": 1})


def study(wanted, done):
    """Measure each model and type that is not done, and yield its figures."""
    out, clients, (python,) = wanted.output, Clients.of(wanted), wanted.python
    texts = {name: (out / f"{name}.npy", out / f"{name}-dense.npy") for name in wanted.texts}
    for name, (file, _) in texts.items():
        if not file.exists():
            write_ids(file, wanted.dense, wanted.texts[name], wanted.sequences)
    masks, width = {f"mask{share:g}": share for share in wanted.mask}, read_config(wanted.dense)["intermediate_size"]
    for name, source in ({"dense": wanted.dense} | {name: out / name for name in masks} | wanted.carves).items():
        kinds = [
            kind for kind in (("f32", *DENSE_TYPES) if name == "dense" else OTHER_TYPES) if (name, kind) not in done
        ]
        if kinds and not source.exists():
            text = scanned_text(wanted.scan, wanted.tokens)
            write_mask(source, wanted.dense, wanted.scan, int(width * masks[name]), text)
        config, folder, sums = read_config(source), source, None
        dense_layers = config.get("mlp_only_layers") or []
        if kinds and dense_layers:
            sums, folder = compare(predictor(source), texts, False, wanted.sequences), out / f"{name}-filled"
            fill_dense_layers(folder, source)
        for kind in kinds:
            file = out / f"{name}-{kind}.gguf"
            convert(folder, file, name, kind, clients, python)
            request = {"llama_cpp": clients.llama_cpp, "texts": {} if dense_layers else texts, "first": kind == "f32"}
            request["count"] = wanted.sequences
            found, tensors = in_client(python, "measure", file=file, **request)
            if dense_layers:
                _, whole = in_client(python, "measure", file=out / f"dense-{kind}.gguf", **request)
                tensors = {each: size for each, size in tensors.items() if ffn_layer(each) not in dense_layers}
                tensors |= {each: size for each, size in whole.items() if ffn_layer(each) in dense_layers}
            experts = config.get("n_routed_experts") or config.get("num_experts") or 1
            read = token_bytes(tensors, config.get("num_experts_per_tok", 1) / experts)
            weights, size = (sum(column) for column in zip(*tensors.values(), strict=True))
            sizes = {"bits": 8 * size / weights, "read": read / 2**20, "resident": size / 2**20}
            yield {"model": name, "type": kind, **sizes, "sums": sums or found}
        (out / f"{name}-bf16.gguf").unlink(missing_ok=True)


def predictor(folder):
    """Ids → logits of all tokens but the last, in transformers and fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return torch.no_grad()(lambda ids: model(torch.tensor([ids])).logits[0, :-1].numpy())


def report(out, picture):
    """A table of rows.jsonl with the speeds that are measured, and a picture of loss over bytes."""
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    speeds, table, texts = read_speeds(out), [], list(rows[0]["sums"])
    figure = Figure(figsize=(4 * len(texts), 4), layout="constrained")
    panels, lines = figure.subplots(1, len(texts), sharey=True, squeeze=False)[0], {}
    for row in rows:
        cells = [row["model"], row["type"], f"{row['bits']:.2f}", f"{row['read']:.1f}", f"{row['resident']:.1f}"]
        for text in texts:
            losses, distances = zip(*row["sums"][text], strict=True)
            dense_losses = [loss for loss, _ in rows[0]["sums"][text]]
            ours, dense = (
                MeanLoss(sum(each), len(each) * (LENGTH - 1), sequences=[(loss, LENGTH - 1) for loss in each])
                for each in (losses, dense_losses[:: len(dense_losses) // len(losses)])
            )
            gap, error = ours.nats - dense.nats, ours.gap_error(dense)
            cells.append(f"{gap:+.4f} ± {error:.4f}, {sum(distances) / ours.tokens:.4f}")
            if row["type"] != "f32":
                lines.setdefault(row["model"], {}).setdefault(text, []).append((row["read"], gap, error))
        table.append(cells + speeds.get(f"{row['model']}-{row['type']}", []))
    head = ["model", "type", "bits/weight", "read, MiB/token", "resident, MiB", *(f"{text}: gap, KL" for text in texts)]
    print(tabulate(table, [*head, "prompt", "generation"], tablefmt="github", disable_numparse=True))  # noqa: T201
    for model, found in lines.items():
        for panel, text in zip(panels, texts, strict=True):
            panel.errorbar(*zip(*found[text], strict=True), marker=".", capsize=2, label=model)
            panel.set(title=text, xlabel="MiB that a token reads", xscale="log")
            panel.set_yscale("symlog", linthresh=0.01)
    panels[0].set_ylim(-0.005, None)
    panels[0].set_ylabel("loss above the dense model's, nats")
    panels[-1].legend(fontsize=8)
    figure.savefig(picture, dpi=110)


def read_speeds(out):
    """CPU seconds of the first type's dense file over those of each file, median over rounds: prompt and generation."""
    found = {}
    for line in (out / "speeds.jsonl").read_text().splitlines() if (out / "speeds.jsonl").exists() else ():
        measured = json.loads(line)["seconds"]
        first = next(iter(measured.values()))
        for file, rounds in measured.items():
            ratios = np.array(first) / np.array(rounds)
            found[Path(file).stem] = [f"{ratio:.2f}" for ratio in np.median(ratios, axis=0)]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--dense", type=Path, default=EMBEDDED, help="folder of the dense model")
    parser.add_argument("--carve", nargs="*", default=[], metavar="NAME=CHECKPOINT")
    parser.add_argument("--mask", nargs="*", type=float, default=[0.75, 0.5], help="widths of static masks, as shares")
    parser.add_argument("--scan", type=Path, help="folder of a result of stage=scan")
    parser.add_argument("--tokens", type=int, default=12_288, help="of the scan's text, to align masks")
    parser.add_argument("--text", nargs="*", default=["library="], metavar="NAME=FILE", help="to measure losses on")
    parser.add_argument("--sequences", type=int, default=16, help=f"of {LENGTH} tokens, from each text")
    parser.add_argument("--speed", type=int, metavar="TOKENS", help="only time prompts of this length, and generation")
    parser.add_argument("--types", nargs="*", default=OTHER_TYPES, help="of the files to time")
    parser.add_argument("--rounds", type=int, default=3, help="of the files in turn, to time")
    parser.add_argument("--memory", type=int, nargs="*", metavar="MIB", help="only generate within these memory limits")
    parser.add_argument("--files", default="*.gguf", help="of OUTPUT, for --memory")
    parser.add_argument("--report", type=Path, metavar="PICTURE", help="only a table and a picture of what is measured")
    Clients.add_options(parser)
    wanted = parser.parse_args()
    wanted.carves = {name: Path(folder) for name, _, folder in (word.partition("=") for word in wanted.carve)}
    wanted.texts = {name: file for name, _, file in (word.partition("=") for word in wanted.text)}
    if wanted.report:
        report(wanted.output, wanted.report)
    elif not wanted.python:
        print(tabulate(shape_rows(), ["GB/token (as bits of all)", "active", *BITS], tablefmt="github"))  # noqa: T201
    elif wanted.speed:
        (python,), out, ids = wanted.python, wanted.output, wanted.output / f"{next(iter(wanted.texts))}.npy"
        for kind in wanted.types:
            names = ["dense", *(f"mask{share:g}" for share in wanted.mask), *wanted.carves]
            files = [out / f"{name}-{kind}.gguf" for name in names]
            for name, file in zip(names, files, strict=True):
                convert(wanted.carves.get(name), file, name, kind, Clients.of(wanted), python)
            first = out / f"dense-{wanted.types[0]}.gguf"
            request = {"files": list(dict.fromkeys([first, *files])), "prompt": wanted.speed}
            request["rounds"] = wanted.rounds
            load, seconds = os.getloadavg()[0], in_client(python, "time_files", ids=ids, **request)
            append(out / "speeds.jsonl", {"prompt": wanted.speed, "load": load, "seconds": seconds})
    elif wanted.memory:
        for file, limit in product(sorted(wanted.output.glob(wanted.files)), wanted.memory):
            ids = wanted.output / f"{next(iter(wanted.texts))}.npy"
            with memory_group(limit) as group:
                seconds, read = in_client(wanted.python[0], "generate", file=file, ids=ids, group=group)
            row = {"file": file.stem, "limit": limit, "tokens/s": 1 / seconds, "MiB from disk": read}
            append(wanted.output / "memory.jsonl", row)
    else:
        wanted.output.mkdir(parents=True, exist_ok=True)
        file = wanted.output / "rows.jsonl"
        rows = map(json.loads, file.read_text().splitlines() if file.exists() else ())
        for row in study(wanted, {(row["model"], row["type"]) for row in rows}):
            append(file, row)


def append(file, row):
    """Add a line to a file, and print it without its lists."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")
    print({key: value for key, value in row.items() if not isinstance(value, dict)}, flush=True)  # noqa: T201


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        print(json.dumps(globals()[sys.argv[2]](**json.loads(sys.argv[3]))))  # noqa: T201
    else:
        main()
