"""Kills change no result: twenty at random moments of a scan, and one at each step of a pool's stages."""

import random
import signal

import pytest
import torch
from integration.carving import published, write_source
from integration.forked import kill_at, start
from safetensors.torch import load_file

from instruments.parameter_scan.file_format import unpack_header
from instruments.parameter_scan.reader import read_mscan
from instruments.safetensors_files import read_facts
from pipeline.artifacts import Manifest, verify
from pipeline.cli import run_command

KILLS = 20


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A scan of 1,000 batches, with the parameter-level record, flushed several times a second."""
    return [
        *("stage=scan", "scan=parameters", *write_source(tmp_path_factory.mktemp("source"), 4000)),
        *("data.tokens=40000", "data.sample_tokens=null", "data.heldout_tokens=100", "data.max_length=20"),
        *("scan.batch_tokens=40", "scan.reservoir_tokens=500", "store.checkpoint_every=0.1"),
    ]


@pytest.fixture(scope="module")
def whole(words, tmp_path_factory):
    """The published folder of an undisturbed scan."""
    outputs = tmp_path_factory.mktemp("whole")
    assert run_command([*words, f"output_dir={outputs}"]) == 0
    return published(outputs, "scan")


def kill_at_random(command, count_done):
    """Start and kill the command repeatedly, then let it finish.

    Half of the kills must hit a running command, and some must come after further flushes: `count_done` gives the
    number of flushed batches.
    """
    draw, hits, done, longest = random.Random(3), 0, {0}, 4.0
    for _ in range(KILLS):
        child = start(command)
        child.join(draw.uniform(0.5, longest))
        child.kill()
        child.join()
        hits += child.exitcode == -signal.SIGKILL
        flushed = count_done()
        longest = longest + 2 if flushed in done else 4.0  # seconds; a slow disk needs longer to begin
        done.add(flushed)
    assert hits >= KILLS // 2, "the scan is too short to be killed that often"
    assert len(done - {0}) >= 5, f"too few kills came after further flushes: {sorted(done)}"
    last = start(command)
    last.join(240)
    assert last.exitcode == 0


def assert_same(found, expected):
    found_sums, sums = (load_file(folder / "statistics.safetensors") for folder in (found, expected))
    assert all(torch.equal(found_sums[name], tensor) for name, tensor in sums.items())
    (header, ours), (other, theirs) = (split_header(folder / "parameters.mscan") for folder in (found, expected))
    assert header.differences(other) == []
    assert header.created
    assert ours == theirs


def split_header(path):
    """The header, which contains a date, and all bytes after it."""
    data = path.read_bytes()
    header, end = unpack_header(path, memoryview(data))
    return header, data[end:]


@pytest.mark.slow
def test_local_sums_survive_twenty_kills(words, whole, tmp_path):
    def count_done():
        files = list((tmp_path / "artifacts").glob("pico/scan/.*/scratch/sums.0.safetensors"))
        return sum(len(read_facts(file)["done"]) for file in files)

    kill_at_random([*words, f"output_dir={tmp_path}"], count_done)
    assert_same(published(tmp_path, "scan"), whole)
    assert len(read_mscan(published(tmp_path, "scan") / "parameters.mscan").sequences) == 2000


# Kills in the stages of a pool, in the order of the chain: stage, function, and number of its call.
POOL_KILLS = [
    ("assemble", "stages.assemble.stage:fit_pool_router", 2),
    ("assemble", "stages.assemble.stage:save_layer_checkpoint", 1),
    ("assemble", "stages.artifacts.carve:Routers.save", 1),
    ("assemble", "models.checkpoint.shards:ShardWriter.add", 9),
    ("assemble", "pipeline.artifacts:sync_tree", 1),
    ("project", "stages.project.stage:sample_layers", 1),
    ("project", "stages.project.pool:sweep_experts", 2),
    ("project", "stages.project.pool:PoolFit.refit_routers", 1),
    ("project", "stages.project.pool:fit_pool_router", 2),
    ("project", "stages.project.gradient_projection:project_neurons", 5),
    ("project", "stages.project.stage:split_pool", 1),
    ("project", "stages.artifacts.carve:Routers.save", 1),
    ("project", "models.checkpoint.shards:ShardWriter.add", 9),
    ("project", "models.checkpoint.shards:ShardWriter.close", 1),
    ("project", "pipeline.artifacts:Manifest.write", 1),
    ("project", "pipeline.artifacts:sync_tree", 1),
]


@pytest.mark.slow
def test_a_pool_survives_kills_in_its_own_work(words, tmp_path):
    pool = [
        *(word for word in words if not word.startswith(("stage=", "scan=", "data.tokens=", "data.heldout_path="))),
        *("stage=project", "data.tokens=1200", "data.heldout_share=0.3", "cluster.map=none"),
        *("topology=global_pool", "experts=7", "n=6", "top_k=2", "always_on=4", "project.router_steps=20"),
        *("project=gradient", "project.validate=false", "project.gradient_tokens=400"),
    ]
    assert run_command([*pool, f"output_dir={tmp_path / 'whole'}"]) == 0
    command = [*pool, f"output_dir={tmp_path / 'killed'}"]
    for stage, function, calls in POOL_KILLS:
        kill_at(command, function, calls)
        stages = tmp_path / "killed" / "artifacts" / "pico"
        for folder in stages.glob("*/[!.]*"):
            verify(folder, remedy="")
        assert list(stages.glob(f"{stage}/[!.]*")) == [], f"published before {function} was done"
    assert run_command(command) == 0
    assert checkpoints(tmp_path / "killed") == checkpoints(tmp_path / "whole")
    assert list((tmp_path / "killed").glob("artifacts/pico/*/.*")) == []


def checkpoints(outputs):
    """Sizes and hashes of all that assemble and project published."""
    return [Manifest.read(published(outputs, stage), remedy="").files for stage in ("assemble", "project")]
