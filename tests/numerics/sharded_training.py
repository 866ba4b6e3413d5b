"""A phase of training in one process, or in two with a copy of the model in each, or with half of every parameter."""

import shutil
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from models.training import Part
from stages.artifacts.job import Workers
from stages.text.batches import TokenSequence, batch_sequences
from stages.text.sequences import LoadedText
from stages.train import loop
from stages.train.config import TrainConfig
from stages.train.loop import TrainContext, TrainingText
from stages.train.objective import Balance, Phase
from stages.train.record import Record
from stages.train.stage import run_phase

SETTINGS = TrainConfig(batch=4, micro_batch=1, log_steps=1, heldout_steps=1, save_steps=2, watch=False)
SETTINGS = replace(SETTINGS, expert_rate=1e-2, rest_rate=1e-2)
SAVED = "all/checkpoint-2"
SEQUENCES = [TokenSequence(str(n), list(range(n, n + 8)), list(range(n, n + 8))) for n in range(9)]


def train(start, folder, workers, *, fsdp=False, precision="float32", starts=(None, SAVED)):
    """Train four steps; then again from the checkpoint of the second step, with the same result."""
    folder.mkdir(exist_ok=True)
    loop.drop_older = lambda _folder: None  # keep the checkpoint of the second step
    gather = loop.optimizer_tensors

    def watched(*given, **settings):
        tensors = gather(*given, **settings)
        assert not fsdp or any(tensor.numel() > 1 for tensor in tensors.values()) == workers.leads
        return tensors

    loop.optimizer_tensors = watched
    for saved in (place and folder / place for place in starts):
        context = TrainContext(
            # One process computes at once what the two do together: the load of an expert is counted over both.
            settings=replace(SETTINGS, fsdp=fsdp, precision=precision, micro_batch=2 // workers.world),
            logit_std=2.0, total=4,
            text=TrainingText(LoadedText(SEQUENCES, {}), batch_sequences(SEQUENCES[:3], 8, 0), 0),
            balance=Balance("loss", 0.0), teacher=None, seed=0, workers=workers, device=torch.device("cpu"),
            record=Record.open(folder, saved, tensorboard=False) if workers.leads else None,
        )  # fmt: skip
        run_phase(start, Phase("all", 0, 4, frozenset(Part)), context, folder / "all")
        if saved is None and workers.leads:
            shutil.move(folder / "all/final", folder / "undisturbed")
        workers.broadcast(None)
    if workers.leads and None in starts:
        ours, undisturbed = (load_file(folder / name / "model.safetensors") for name in ("all/final", "undisturbed"))
        assert all(torch.equal(ours[name], undisturbed[name]) for name in undisturbed)


def main(rank, port, folder):
    """Train in one of two processes, by copies, by shards, and by shards from a checkpoint of the copies."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(minutes=2))
    for name, fsdp in (("copies", False), ("shards", True)):
        for kind, precision in (("", "float32"), ("rounded ", "bfloat16")):
            place = folder / f"{kind}{name}"
            train(folder / "start", place, Workers(rank, 2, rank, 2), fsdp=fsdp, precision=precision)
    if rank == 0:
        shutil.copytree(folder / "copies" / SAVED, folder / "shards of copies" / SAVED)
    dist.barrier()
    train(folder / "start", folder / "shards of copies", Workers(rank, 2, rank, 2), fsdp=True, starts=[SAVED])
    dist.destroy_process_group()
