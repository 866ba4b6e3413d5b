"""Options of a scan, through the command."""

import json
import math
import shutil
from datetime import datetime

import numpy as np
import pytest
import torch
from integration.carving import published, write_source
from integration.forked import start
from integration.redis_server import running
from pico import TWO_WIDTHS, edited_tensors, write_pico
from safetensors.torch import load_file

from instruments.parameter_scan.reader import read_mscan
from pipeline.artifacts import Manifest
from pipeline.cli import run_command
from stages.artifacts.carve import NeuronStatistics
from stages.scan.passes import Scanner


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model, plain text, and conversations, one without an answer."""
    folder = tmp_path_factory.mktemp("source")
    write_source(folder, 900)
    chats = [
        [{"role": "user", "content": f"Who met {number} gulls?"}, {"role": "assistant", "content": f"Rook {number}."}]
        for number in range(30)
    ]
    del chats[4][1]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    return folder


@pytest.fixture
def scan(source, tmp_path):
    """Run stage=scan; returns the published folder."""

    def run(*words, text="text.txt", outputs=tmp_path):
        assert run_command([*command(source, text), *words, f"output_dir={outputs}"]) == 0
        return published(outputs, "scan")

    return run


def command(source, text="text.txt"):
    return [
        *("stage=scan", "model=local", f"model.path={source / 'pico'}", "model.label=pico"),
        *("data=text", f"data.path={source / text}", f"data.heldout_path={source / 'heldout.txt'}"),
        *("data.tokens=600", "data.heldout_tokens=100", "data.heldout_share=0", "data.max_length=60"),
        "scan.batch_tokens=120",
    ]


def test_neurons_that_narrow_layers_lack_count_nowhere(source, tmp_path):
    """As in Gemma 4 E2B: 40, 40, 80 and 80 neurons."""
    narrow = TWO_WIDTHS | {"vocab_size_per_layer_input": 4096}
    write_pico(tmp_path / "pico", "gemma4_text", layers=narrow.pop("num_hidden_layers"), tokenizer=True, **narrow)
    words = [*command(source), f"model.path={tmp_path / 'pico'}", "stage=layers", "scan=parameters"]
    assert run_command([*words, f"output_dir={tmp_path}"]) == 0
    statistics = NeuronStatistics.load(published(tmp_path, "scan"))
    assert (statistics.weight_norm_down > 0).sum(1).tolist() == [40, 40, 80, 80]
    assert not statistics.sum_abs[:2, 40:].any()
    scanned = read_mscan(published(tmp_path, "scan") / "parameters.mscan").header.table.entries
    assert [one.out_features for one in scanned if one.name.endswith("gate_proj.weight")] == [40, 40, 80, 80]
    assert (
        Manifest.read(published(tmp_path, "layers"), remedy="").table.notes[-1]
        == "layers of fewer neurons stay dense: 0, 1"
    )


def test_two_jobs_that_share_a_server_share_the_work(source, tmp_path, scan):
    """As on two machines: the jobs share only the server."""
    alone = load_file(scan("data.tokens=4000", outputs=tmp_path / "alone") / "statistics.safetensors")
    with running(tmp_path / "redis") as server:
        store = ("store=redis", f"store.url={server.url}", "store.checkpoint_every=0", "data.tokens=4000")
        outputs = [tmp_path / name for name in ("first", "second")]
        jobs = [
            start([*command(source), *store, f"output_dir={place}"], tmp_path / f"{place.name}.log")
            for place in outputs
        ]
        for job, place in zip(jobs, outputs, strict=True):
            job.join(120)
            assert job.exitcode == 0, (tmp_path / f"{place.name}.log").read_text()
    for place in outputs:
        found = load_file(published(place, "scan") / "statistics.safetensors")
        for name, tensor in alone.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-15, msg=name)


def test_the_parameter_level_record_stands_beside_unchanged_statistics(scan, tmp_path):
    plain, recorded = scan(outputs=tmp_path / "plain"), scan("scan=parameters", outputs=tmp_path / "recorded")
    assert (plain / "statistics.safetensors").read_bytes() == (recorded / "statistics.safetensors").read_bytes()
    record = read_mscan(recorded / "parameters.mscan")
    assert len(record.parameters.names) == 2 * 7 + 2  # embedding and output embedding are two weights here
    assert sum(sequence.tokens for sequence in record.sequences) == 600
    assert datetime.fromisoformat(record.header.created).tzinfo is not None


def test_float16_overflow_lowers_the_loss_scale_of_both_records(source, tmp_path, monkeypatch):
    scales, measure = set(), Scanner._measure

    def watched(scanner, batch, slots_BT, loss_scale):
        scales.add(loss_scale)
        return measure(scanner, batch, slots_BT, loss_scale)

    monkeypatch.setattr(Scanner, "_measure", watched)
    monkeypatch.setattr("stages.scan.passes.WORSE_THAN_CHANCE", math.inf)  # the logits are 1,000 times as large
    model = shutil.copytree(source / "pico", tmp_path / "steep")
    with edited_tensors(model) as weights:
        weights["lm_head.weight"] *= 1000
    found = {}
    for dtype in ("float32", "float16"):
        words = [*command(source), f"model.path={model}", f"model.dtype={dtype}", "scan=parameters"]
        assert run_command([*words, f"output_dir={tmp_path / dtype}"]) == 0
        found[dtype] = read_mscan(published(tmp_path / dtype, "scan") / "parameters.mscan").gradient()
    error = abs(found["float16"] - found["float32"]) / found["float32"]
    assert np.median(error) < 0.02
    assert len(scales - {1.0}) > 1, "nothing overflowed"


def test_only_what_matches_is_recorded(scan, source, tmp_path, capsys):
    folder = scan("scan=parameters", "scan.parameter_patterns=['*.q_proj']", "scan.block_width=8")
    record = read_mscan(folder / "parameters.mscan")
    assert record.parameters.names == [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)]
    words = [*command(source), "scan=parameters", "scan.parameter_patterns=['nothing']", f"output_dir={tmp_path}"]
    assert run_command(words) == 2
    assert "scan.parameter_patterns=['nothing']" in capsys.readouterr().err


def test_labels_the_model_writes(scan, capsys):
    words = ("data.labels=generated", "data.max_new_tokens=8", "data.tokens=300", "data.prompt_tokens=9")
    folder = scan(*words, text="chats.jsonl")
    assert load_file(folder / "statistics.safetensors")["grad_norm_gate"].all()
    assert "generated text:" in capsys.readouterr().out


def test_skipped_samples_are_counted_and_named(scan, capsys):
    folder = scan("data.labels=completion", "data.packing=single", text="chats.jsonl")
    (skipped,) = json.loads((folder / "skipped.json").read_text()).values()
    assert len(skipped) == 1
    assert f"skipped 1 sequence (no token counts in the loss: {skipped[0]})" in capsys.readouterr().out
