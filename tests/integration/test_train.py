"""stage=train on a real chain: a native checkpoint, exact resumption, two processes like one, clear errors."""

import json
import os
import re
import resource
import shutil
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from integration.carving import words_of_pico
from integration.forked import run_workers, start
from pico import tensors_in, write_pico
from transformers import AutoModelForCausalLM

from instruments.errors import FAILED, ConfigError
from pipeline.artifacts import verify
from pipeline.cli import run_command
from stages.artifacts.carve import Routers

QUICK = (
    "train.tokens=4000", "train.batch=4", "train.micro_batch=2", "train.log_steps=2", "train.heldout_steps=4",
    "train.save_steps=4", "train.heldout_sequences=3", "train.tensorboard=false", "train.router_share=0.3",
    "train.all_share=0.3",
)  # fmt: skip


@pytest.fixture(scope="module")
def projected(tmp_path_factory, text):
    """The command line of a chain whose stages before training are done."""
    folder = tmp_path_factory.mktemp("train")
    words = [
        *words_of_pico(write_pico(folder / "pico", "qwen3", tokenizer=True), text),
        *("experts=4", "n=8", "top_k=2", "always_on=6", "cluster=rank", "project.router_steps=0"),
        *("assemble.logit_std=0.001", "project.gradient_projection=false", "vocabulary.tokens=0", "cluster.map=none"),
        *("evaluate.speed_tokens=0", "evaluate.samples=0", "evaluate.baselines=[]", f"output_dir={folder / 'outputs'}"),
    ]
    assert run_command([*words, "stage=project"]) == 0
    return words


@pytest.fixture(scope="module")
def trained(projected):
    """The published folder of an undisturbed training."""
    assert run_command([*projected, *QUICK, "stage=train"]) == 0
    return published(projected)


def outputs_of(words):
    (outputs,) = [word.partition("=")[2] for word in words if word.startswith("output_dir=")]
    return Path(outputs)


def published(words, stage="train"):
    folders = (outputs_of(words) / "artifacts/pico" / stage).glob("[!.]*")
    return max(folders, key=lambda folder: folder.stat().st_mtime)


def copy_untrained(words, outputs):
    """Copy the outputs without their trainings; returns the command line there."""
    shutil.copytree(outputs_of(words), outputs, symlinks=True)
    shutil.rmtree(outputs / "artifacts/pico/train")
    return [*(word for word in words if not word.startswith("output_dir=")), f"output_dir={outputs}"]


def lines_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


def heldout_losses(folder):
    return [line["heldout_loss"] for line in lines_of(folder) if "heldout_loss" in line]


def test_training_lowers_the_loss_and_counts_every_token_once(trained):
    lines = lines_of(trained)
    heldout = heldout_losses(trained)
    assert heldout[-1] < heldout[0]
    steps = [line["step"] for line in lines if "tokens" in line]
    assert steps == sorted(set(steps))
    assert lines[0]["phase"] == "start"
    assert {line["phase"] for line in lines} == {"start", "router", "experts", "all"}
    assert 3800 < lines[-1].get("tokens", lines[-2].get("tokens")) < 4400


def test_the_result_is_a_native_checkpoint_of_the_same_names(trained):
    manifest = json.loads((trained / "manifest.json").read_text())
    before = trained.parents[1] / "project" / manifest["recipe"]["parents"]["project"][:16] / "checkpoint"
    tensors, earlier = map(tensors_in, (trained / "checkpoint", before))
    assert tensors.keys() == earlier.keys()
    assert {k: (v.shape, v.dtype) for k, v in tensors.items()} == {k: (v.shape, v.dtype) for k, v in earlier.items()}
    changed = {name for name in tensors if not torch.equal(tensors[name], earlier[name])}
    assert changed >= {name for name in tensors if ".mlp." in name}
    configs = [(folder / "config.json").read_text() for folder in (trained / "checkpoint", before)]
    assert configs[0] == configs[1]
    model, routers = AutoModelForCausalLM.from_pretrained(trained / "checkpoint"), Routers.load(trained)
    for layer, rows in zip(model.model.layers, routers.rows, strict=True):
        assert torch.equal(layer.mlp.gate.weight, rows)
    assert routers.logit_std == 0.001
    card = (trained / "checkpoint/README.md").read_text()
    assert "dense model: held-out loss " in card


def test_bfloat16_trains_like_float32(trained, projected):
    assert run_command([*projected, *QUICK, "stage=train", "train.precision=bfloat16"]) == 0
    half = published(projected)
    assert half != trained
    assert heldout_losses(half) == pytest.approx(heldout_losses(trained), rel=5e-3)
    assert heldout_losses(half) != heldout_losses(trained)


def test_evaluate_looks_at_the_trained_model_if_asked(projected):
    losses = {}
    for checkpoint in ("project", "train"):
        assert run_command([*projected, *QUICK, "stage=evaluate", f"evaluate.checkpoint={checkpoint}"]) == 0
        folder = published(projected, "evaluate")
        record, manifest = (json.loads((folder / f"{name}.json").read_text()) for name in ("evaluation", "manifest"))
        assert any("trained by" in note for note in manifest["table"]["notes"]) == (checkpoint == "train")
        losses[checkpoint] = {name: model["loss"] for name, model in record["models"].items()}
    assert losses["train"]["dense"] == losses["project"]["dense"]
    assert losses["train"]["carved"] < losses["project"]["carved"]


def test_killed_and_taken_up_again_it_takes_the_same_way(projected, trained, tmp_path):
    kill_in_every_phase([*projected, *QUICK, "stage=train"], trained, ("router", "experts", "all"), tmp_path)


def weights_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("checkpoint/*.safetensors")}


def kill_in_every_phase(words, undisturbed, phases, tmp_path):
    """Kill the command once in each phase; resumed, it must give the results of the `undisturbed` run."""
    words = copy_untrained(words, tmp_path / "outputs")
    kills = 0
    for number in range(len(phases)):
        # A later phase, too: the files of a short one may be gone before they are seen.
        saved = [f".*/scratch/{phase}/checkpoint-*/whole" for phase in phases[number:]]
        child = start(words)
        deadline = time.monotonic() + 120
        while child.is_alive() and time.monotonic() < deadline:
            if any(any((tmp_path / "outputs/artifacts/pico/train").glob(pattern)) for pattern in saved):
                os.kill(child.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        child.join(60)
        assert child.exitcode is not None
    assert kills >= max(1, len(phases) - 1)
    assert run_command(words) == 0
    again = published(words)
    assert lines_of(again) == lines_of(undisturbed)
    assert weights_of(again) == weights_of(undisturbed)


def test_training_reads_its_own_sources_and_judges_by_the_held_out_text_of_the_carve(
    projected, trained, tmp_path, capsys
):
    own = tmp_path / "own.txt"
    own.write_text("".join(f"line {number} of another text\n\n" for number in range(400)))
    words = [*projected, *QUICK, "stage=train", f"train.sources=[{{path:{own}}}]"]
    assert run_command([*words, "plan=true"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if " runs: " in line] == ["train"]
    assert run_command(words) == 0
    first, others = lines_of(published(words))[0], lines_of(trained)[0]
    assert first == others  # of the carve and the dense model, on held-out text
    assert lines_of(published(words))[1:] != lines_of(trained)[1:]


def test_a_healed_carve_comes_nearer_to_the_dense_model_and_survives_a_kill(projected, tmp_path):
    shares = [word for word in QUICK if "_share" not in word]
    words = [*projected, *shares, "stage=train", "train=heal", "train.expert_rate=3e-3"]
    assert run_command(words) == 0
    healed = published(words)
    distances = [line["logits"] for line in lines_of(healed) if "logits" in line]
    assert distances[-1] < 0.9 * distances[0]
    kill_in_every_phase(words, healed, ("all",), tmp_path)


def test_two_processes_train_like_one(projected, tmp_path):
    # Not balance by bias: another order of summation may flip a choice, and then the sign of a bias update.
    words = [*projected, *QUICK, "stage=train", "train.balance=loss"]
    # One process takes all sequences of a step at once, as the two together do.
    assert run_command([*(word for word in words if "micro_batch" not in word), "train.micro_batch=4"]) == 0
    alone = lines_of(published(words))
    words = copy_untrained(words, tmp_path / "outputs")
    found = run_workers(2, words, tmp_path / "said")
    assert [code for code, _ in found] == [0, 0], found
    together = lines_of(published(words))
    assert [line["phase"] for line in together] == [line["phase"] for line in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"phase", "heldout_text"}:
            assert one[name] == pytest.approx(other[name], rel=1e-2 if "load" in name else 2e-3), (one["step"], name)


def test_a_full_disk_is_told_and_the_same_command_goes_on(projected, trained, capsys):
    """A limit on the size of files, below a training checkpoint's, acts like a full disk, without root."""
    words = [*projected, *QUICK, "stage=train", "fresh=true"]
    before = set(trained.parent.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, hard))
    try:
        assert run_command(words) == FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    what, where, do = capsys.readouterr().err.splitlines()[-3:]
    assert what.startswith("no room left on the disk: about ")
    assert "stage=train" in where
    assert "output_dir= on another disk" in do
    assert set(trained.parent.iterdir()) == before
    verify(trained, remedy="")


def test_what_is_not_finite_is_named_and_stops_before_harm(projected, capsys):
    quick = [word for word in QUICK if "_share" not in word]
    words = [*projected, *quick, "stage=train", "train=full", "train.expert_rate=1e30", "train.warmup_share=0"]
    assert run_command(words) == FAILED
    error = capsys.readouterr().err
    assert "gave no finite gradient and was not applied" in error
    assert "first in the output of" in error


def test_training_that_diverges_stops_at_the_next_look_at_held_out_text(projected, capsys):
    words = [*projected, *(word for word in QUICK if "_share" not in word), "stage=train", "train=full"]
    rates = ["train.expert_rate=1", "train.rest_rate=1", "train.warmup_share=0"]
    assert run_command([*words, *rates, "train.heldout_steps=1", "train.log_steps=1"]) == FAILED
    what, where, do = capsys.readouterr().err.splitlines()[-3:]
    assert re.search(r"training diverges: held-out loss .* after step \d, .* before training", what)
    assert "last checkpoint: that before training" in where
    assert "lower train.router_rate=" in do


def test_training_that_cannot_be_watched_says_so_until_told_not_to_watch(projected, monkeypatch, capsys):
    """A mock for models sharded by torch's first FSDP, which cannot be watched and need several processes."""
    monkeypatch.setattr("stages.train.loop.watch_model", Mock(side_effect=ConfigError("these are no gradients")))
    words = [*projected, *QUICK, "stage=train", "train.tokens=200", "fresh=true"]
    assert run_command(words) == 0
    (said,) = set(re.findall("training goes on unwatched: .*", capsys.readouterr().out))
    advice = said.partition("; ")[2].removesuffix(" says so")
    assert advice == "train.watch=false"
    assert run_command([*words, advice]) == 0
    assert "unwatched" not in capsys.readouterr().out
