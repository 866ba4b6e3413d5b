"""Training with copies of the model, or with shards of it, in two processes equals training in one."""

import json

import pytest
import torch
from integration.forked import free_port, run_ranks
from pico_moes import make_moe
from safetensors.torch import load_file

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


def test_shards_are_added_up_and_each_process_has_its_own_log(tmp_path):
    from numerics.sharded_watch import main

    port = free_port()
    run_ranks(2, lambda rank: main(rank, port, tmp_path / "watch.jsonl"))
    logs = {path.name: [line["step"] for line in read_step_log(path)] for path in tmp_path.iterdir()}
    assert logs == {"watch.jsonl": [0, 1], "watch-1.jsonl": [0, 1]}
