"""Training, and the monitor of training, with copies or shards of a model in two processes equal one process."""

import json

import pytest
import torch
import torch.distributed as dist
from integration.forked import free_port, run_ranks
from pico_moes import make_moe
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from instruments.training_watch.model_watch import watch_model
from instruments.training_watch.step_log import read_step_log
from stages.artifacts.job import Workers


def figures(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines for name in ("loss", "gradient_norm", "heldout_loss") if name in line]


def test_two_processes_train_and_resume_like_one(tmp_path):
    from numerics.sharded_training import main, train

    torch.manual_seed(0)
    make_moe("qwen3_moe", tie_word_embeddings=True).save_pretrained(tmp_path / "start")
    run_ranks(1, lambda _rank: train(tmp_path / "start", tmp_path / "alone", Workers()))
    port = free_port()
    run_ranks(2, lambda rank: main(rank, port, tmp_path))
    alone = load_file(tmp_path / "alone/all/final/model.safetensors")
    start = load_file(tmp_path / "start/model.safetensors")
    for name in ("copies", "shards", "shards of copies"):
        assert figures(tmp_path / name) == pytest.approx(figures(tmp_path / "alone"), rel=1e-4)
        found = load_file(tmp_path / name / "all/final/model.safetensors")
        assert found.keys() == alone.keys()
        for key, tensor in alone.items():
            moved = (tensor - start[key]).norm()
            assert (found[key] - tensor).norm() <= 1e-2 * moved, (name, key)
    copies, shards = (figures(tmp_path / f"rounded {name}") for name in ("copies", "shards"))
    assert shards == pytest.approx(copies, rel=1e-4) != figures(tmp_path / "copies")


def report_of(model):
    """Report of one step; all processes have the same batch."""
    with watch_model(model) as watch:
        loss = model(torch.randn(7, 6, generator=torch.Generator().manual_seed(1))).square().mean()
        loss.backward()
        return watch.step(loss=loss)


def follow(model, wrapped, rank, log=None):
    """Train without `watch.step`; batches differ between processes, so the norm is that of the mean gradient."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with watch_model(model, optimizer, log=log) as watch:
        for step in range(2):
            x = torch.randn(7, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            wrapped(x).square().mean().backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            assert abs(watch.last.gradient_norm - norm) < 1e-5 * norm, (watch.last.gradient_norm, norm)
            optimizer.zero_grad()


def compare(rank, port, log):
    """Compare the reports of the whole and of the sharded model, in one of two processes; both write a log."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    whole = report_of(model)
    model.zero_grad()
    follow(model, nn.parallel.DistributedDataParallel(model), rank, log)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    shards = report_of(model)
    assert shards.layers.keys() == whole.layers.keys()
    for name, norm in whole.layers.items():
        assert abs(shards.layers[name] - norm) < 1e-5 * norm, (name, shards.layers[name], norm)
    follow(model, model, rank)
    dist.destroy_process_group()


def test_shards_are_added_up_and_each_process_has_its_own_log(tmp_path):
    port = free_port()
    run_ranks(2, lambda rank: compare(rank, port, tmp_path / "watch.jsonl"))
    logs = {path.name: [line["step"] for line in read_step_log(path)] for path in tmp_path.iterdir()}
    assert logs == {"watch.jsonl": [0, 1], "watch-1.jsonl": [0, 1]}
