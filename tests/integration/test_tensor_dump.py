"""Dumps that are killed, run out of disk space or share a folder; unchanged scripts; stage=dump."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from integration.carving import published
from integration.forked import run_ranks, start
from safetensors.torch import load_file
from unit.instruments.tensor_dump.small_model import Small, inputs, run

from instruments.errors import INVALID, ContractError, UserError
from instruments.tensor_dump import auto, writer
from instruments.tensor_dump.command import main
from instruments.tensor_dump.config import DumpConfig
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.tensor_dump import TensorDump
from pipeline.cli import run_command

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}:{os.environ.get('PYTHONPATH', '')}",
    "OMP_NUM_THREADS": "1",
}


def dump_until_stopped(command):
    """Write a line for every step; a limit on the size of files ends the dump."""
    folder, limit = command
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    writer.SHARD_BYTES = 2**20
    model = Small(features=512, hidden=300)
    try:
        with TensorDump(model, folder, DumpConfig(memory_mib=8), environment={}) as dump:
            for step in count():
                loss = model(inputs(step, 256, 512))
                loss.backward()
                dump.step(loss)
                sys.stdout.write(f"{step}\n")
    except UserError as error:
        sys.stderr.write(f"{error}\n")
    return 1


def start_dump(tmp_path, *, steps=0, limit=None):
    """Dump in a child; returns once these steps are done."""
    said = tmp_path / "said"
    said.touch()
    child = start((tmp_path / "dump", limit), said, work=dump_until_stopped)
    while f"\n{steps}\n" not in f"\n{said.read_text()}" and child.is_alive():
        time.sleep(0.01)
    return child


def assert_whole(folder):
    """Check that every listed tensor can be read and inputs are those of their step; returns the number of records."""
    with DumpReader(folder) as reader:
        assert reader.missing_files == ()
        for record in reader.records:
            tensor = reader.load(record)
            if (record.source.module, record.source.tensor) == ("layers.0", "input"):
                assert torch.equal(tensor, inputs(record.source.step, 256, 512))
        return len(reader.records)


@pytest.mark.parametrize("steps", [1, 19])
def test_a_killed_dump_lists_only_what_is_whole(tmp_path, steps):
    child = start_dump(tmp_path, steps=steps)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    found = assert_whole(tmp_path / "dump")
    assert found >= 6 * (steps - 2)
    assert DumpReader(tmp_path / "dump").manifests() == {}


def test_a_folder_that_fills_up(tmp_path):
    # No file may grow beyond half a MiB: the first shard cannot be written.
    child = start_dump(tmp_path, steps=10**6, limit=2**19)
    child.join(120)
    assert child.exitcode == 1
    first, where, remedy = (tmp_path / "said").read_text().strip().splitlines()[-3:]
    assert first.startswith("the dump ended early, ")
    assert "File too large" in first
    assert where == f"  where: {tmp_path / 'dump'}; tensors listed in its index are complete"
    assert remedy.startswith("  do:    free some space or dump into another folder")
    assert assert_whole(tmp_path / "dump") == 0
    assert list((tmp_path / "dump").glob("*.partial")) == []


def test_two_processes_and_one_folder(tmp_path):
    child = start_dump(tmp_path)
    try:
        with pytest.raises(ContractError, match="the folder holds a dump already") as error:
            TensorDump(Small(), tmp_path / "dump", environment={}).__enter__()
    finally:
        child.kill()
        child.join()
    assert error.value.where == str(tmp_path / "dump" / "index-00000.jsonl")
    with pytest.raises(ContractError, match="the folder holds a dump already"):
        run(tmp_path / "dump", steps=1)


def test_processes_of_one_job_share_a_folder(tmp_path):
    def replica(rank):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        run(tmp_path / "dump", steps=2)
        dist.destroy_process_group()

    run_ranks(2, replica)
    listing = DumpReader(tmp_path / "dump")
    assert {record.rank for record in listing.records} == {0, 1}
    assert len({record.name for record in listing.records}) == len(listing.records) == 24
    assert sorted(record.counter for record in listing.records) == list(range(24))
    assert listing.manifests().keys() == {0, 1}


TRAINING = """
import instruments.tensor_dump.auto
import torch
from torch import nn
torch.manual_seed(0)
body, head = nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3)
model = nn.Sequential(body, head)
optimizers = [torch.optim.AdamW(body.parameters()), torch.optim.SGD(head.parameters(), lr=0.1)]
with torch.no_grad():
    nn.Linear(6, 6)(torch.ones(2, 6))  # a frozen teacher
for step in range(3):
    for microbatch in range(2):
        nn.CrossEntropyLoss()(model(torch.randn(4, 6)), torch.tensor([0, 1, 2, 0])).backward()
    with torch.no_grad():
        model(torch.randn(2, 6))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
print(sum(parameter.sum() for parameter in model.parameters()).item())
"""


def train_with(tmp_path, **environment):
    words = [sys.executable, "-c", TRAINING]
    return subprocess.run(
        words, env=ENVIRONMENT | environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_an_unchanged_script_is_dumped_by_its_environment_alone(tmp_path):
    plain = train_with(tmp_path)
    assert (plain.returncode, plain.stderr, list(tmp_path.iterdir())) == (0, "", [])
    settings = json.dumps({"tensors": ["input", "grad_output"], "max_steps": 2})
    done = train_with(tmp_path, TENSOR_SAVE_ENABLED="1", CUSTOM_QUANT_TYPE="mxfp8", TENSOR_SAVE_CONFIG=settings)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    assert f"tensor dump: Sequential, every step, into {tmp_path}/tensor_logs" in done.stderr
    with DumpReader(tmp_path / "tensor_logs") as reader:
        passes = Counter(
            (record.source.step, record.source.microbatch, record.source.evaluation)
            for record in reader.select(tensor="input", module={"0.0", "1"})
        )
        trained = {(step, microbatch, False): 2 for step in (0, 1) for microbatch in (0, 1)}
        # Hooks are attached during the first forward pass, which is recorded from there on.
        assert passes == trained | {(step, 0, True): 2 for step in (0, 1)}
        assert {record.label for record in reader.records} == {"mxfp8"}
        assert list(reader.manifests()[0].complaints()) == []
    assert "the folder holds a dump already" in train_with(tmp_path, TENSOR_SAVE_ENABLED="1").stderr


SCRIPT = """
import sys
from pathlib import Path
from sibling import width  # of the script's folder
import torch
if __name__ == "__main__":
    assert Path(__file__).name == "train.py"
    model = torch.nn.Sequential(torch.nn.Linear(width, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    print(sys.argv)
    sys.exit(int(sys.argv[-1])) if sys.argv[-1] != "fail" else model(None)
"""


def test_a_script_runs_unchanged_below_the_command(tmp_path):
    """With its arguments, its folder, its exit code and its traceback; switched off, the dump says nothing."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "sibling.py").write_text("width = 6\n")

    def train(last, **environment):
        words = [sys.executable, "-m", "instruments.tensor_dump.auto", "scripts/train.py", "--lr", last]
        settings = ENVIRONMENT | environment
        return subprocess.run(words, env=settings, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = train("3", TENSOR_SAVE_DIR="dump")
    assert (done.returncode, done.stdout) == (3, "['scripts/train.py', '--lr', '3']\n"), done.stderr
    assert done.stderr == f"tensor dump: Sequential, every step, into {tmp_path}/dump\n"
    with DumpReader(tmp_path / "dump") as reader:
        assert {record.source.tensor for record in reader.records} == {"input", "weight", "grad_output"}
        assert list(reader.manifests()[0].complaints()) == []
    failed = train("fail", TENSOR_SAVE_ENABLED="0")
    assert failed.returncode == 1
    assert failed.stderr.startswith("Traceback")
    assert "in <module>\n    sys.exit(" in failed.stderr
    assert "TypeError: linear()" in failed.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump", "scripts"]


@pytest.mark.parametrize(
    ("script", "environment", "said"),
    [("nowhere.py", {}, "there is no script nowhere.py"), (__file__, {"CUSTOM_QUANT_TYPE": "fp3"}, "quant type 'fp3'")],
)
def test_a_command_that_cannot_start_runs_nothing(script, environment, said, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert auto.main([script]) == INVALID
    assert said in capsys.readouterr().err


@pytest.fixture
def words(sound, text, tmp_path):
    source = ["model=local", f"model.path={sound}", "model.label=pico", "data=text", f"data.path={text}"]
    return ["stage=dump", *source, "data.tokens=900", "dump.batch_tokens=256", f"output_dir={tmp_path / 'outputs'}"]


def test_the_stage_dumps_the_configured_model(words, tmp_path, capsys):
    assert run_command([*words, "dump.steps=2", "dump.quant_type=mxfp8"]) == 0
    said = capsys.readouterr()
    assert "Tensors dumped" in said.out + said.err
    with DumpReader(published(tmp_path / "outputs", "dump")) as reader:
        assert {record.source.step for record in reader.records} == {0, 1}
        assert {record.source.tensor for record in reader.records} == set(DumpConfig().tensors) - {"expert"}
        assert {record.metadata["model"] for record in reader.records} == {"pico"}
        assert {record.label for record in reader.records} == {"mxfp8"}
        assert load_file(published(tmp_path / "outputs", "dump") / reader.records[0].file)
    assert json.loads((published(tmp_path / "outputs", "dump") / "manifest-00000.json").read_text())["missing"] == {}
    assert run_command([*words, "dump.steps=2", "dump.quant_type=mxfp8"]) == 0


def test_the_stage_without_gradients(words, tmp_path):
    assert run_command([*words, "dump.gradients=false", 'dump.modules=["*layers.1.*"]']) == 0
    assert {record.source.direction for record in DumpReader(published(tmp_path / "outputs", "dump")).records} == {
        "forward"
    }


def test_the_stage_with_recomputed_layers_dumps_the_same(words, tmp_path):
    assert run_command(words) == 0
    plain = published(tmp_path / "outputs", "dump")
    assert run_command([*words, "dump.gradient_checkpointing=true"]) == 0
    (other,) = {*plain.parent.iterdir()} - {plain}
    assert main(["compare", str(plain), str(other)]) == 0


def test_the_stage_names_its_settings_in_errors(words, capsys):
    assert run_command([*words, 'dump.modules=["*.nothing"]']) == INVALID
    said = capsys.readouterr().err
    assert "no module matches *.nothing; they are called down_proj, " in said
    assert "where: setting dump.modules\n  do:    dump.modules=['*." in said
    assert run_command([*words, "dump.quant_type=fp3"]) == INVALID
    assert "dump.quant_type=fp3 is none of hifp8, mxfp8, mxfp4, bf16, fp16" in capsys.readouterr().err
    assert run_command([*words, "dump.gradients=false", "dump.tensors=[grad_output]"]) == INVALID
    assert "dump.gradients=false computes no gradient" in capsys.readouterr().err


def test_the_stage_reads_the_same_environment(words, monkeypatch, tmp_path, capsys):
    link = tmp_path / "named" / "logs"
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp8")
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(link))
    assert run_command([*words, "dump.keep=statistics"]) == 0
    assert link.resolve() == published(tmp_path / "outputs", "dump").resolve()
    assert {record.label for record in DumpReader(link).records} == {"mxfp8"}
    link.unlink()
    assert run_command([*words, "dump.keep=statistics"]) == 0  # kept from before, and linked again
    assert link.is_symlink()
    link.unlink()
    link.mkdir()
    assert run_command([*words, "dump.keep=statistics"]) == INVALID
    assert "exists already and is not a link, so this run cannot replace it" in capsys.readouterr().err
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "0")
    assert run_command(words) == INVALID
    said = capsys.readouterr().err
    assert "the dump is switched off\n" in said
    assert "environment variable TENSOR_SAVE_ENABLED\n  do:    dump.enabled=true" in said
