"""A real disk that fills up: a clear error, no partial result, and with more room the same command works."""

import shutil
import subprocess

import pytest
from pico import write_pico

from instruments.errors import FAILED, INVALID
from pipeline.artifacts import Manifest
from pipeline.cli import run_command

STAGES = ("scan", "score", "cluster", "extract", "assemble", "project", "train", "evaluate", "dump")
KIB = 1024
# Free bytes for a result of `size` bytes: the disk fills up at the run's record, before, in or after the result.
ROOMS = {
    "none": lambda _size: 0,
    "a record": lambda _size: 12 * KIB,
    "half a result": lambda size: size // 2 + 12 * KIB,
    "a result": lambda size: size + 20 * KIB,
    "a result and a half": lambda size: size * 3 // 2 + 20 * KIB,
    "three results": lambda size: size * 3 + 20 * KIB,
}
NOT_REPRODUCED = ("metrics.jsonl", "tensorboard", "evaluation.json", "parameters.mscan")  # contain times


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A file system of 96 MiB in memory."""
    folder = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=96m", "none", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small disk of its own needs root: {getattr(error, 'stderr', error)}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def words(disk, tmp_path_factory):
    """The command line of a finished chain on the disk, with training and dump."""
    folder = tmp_path_factory.mktemp("source")
    write_pico(folder / "pico", "qwen3", tokenizer=True)
    lines = (f"{number} sparrows met {number * 7 % 31} finches near house {number % 9}." for number in range(400))
    (folder / "text.txt").write_text("\n\n".join(lines))
    words = [
        *("model=local", f"model.path={folder / 'pico'}", "model.label=pico", f"output_dir={disk}"),
        *("data=text", f"data.path={folder / 'text.txt'}", "data.tokens=900", "data.heldout_tokens=300"),
        *("data.max_length=50", "data.heldout_share=0.3", "scan=parameters", "scan.batch_tokens=100"),
        *("store.checkpoint_every=0", "experts=4", "n=8", "top_k=2", "always_on=8", "cluster.map=none"),
        *("evaluate.speed_tokens=0", "train.tokens=1000", "train.batch=4", "train.micro_batch=2", "dump.steps=2"),
        *("train.heldout_steps=4", "train.save_steps=2", "train.heldout_sequences=3"),
        *("project.descent_steps=4", "project.router_steps=20"),
    ]
    for stage in ("train", "evaluate", "dump"):
        assert run_command([*words, f"stage={stage}"]) == 0
    return words


def read_files(disk, stage):
    """Size and hash of each published file; only the names for a dump, which contains times."""
    (folder,) = (disk / "artifacts" / "pico" / stage).glob("[!.]*")
    files = Manifest.read(folder, remedy="").files
    kept = {name: facts for name, facts in files.items() if not name.startswith(NOT_REPRODUCED)}
    return kept if stage != "dump" else [*kept]


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_disk_that_fills_up(disk, words, capsys, stage, room):
    before, published = read_files(disk, stage), disk / "artifacts" / "pico" / stage
    size = sum(path.stat().st_size for path in published.rglob("*") if path.is_file())
    shutil.rmtree(published)
    shutil.rmtree(disk / "runs")
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - ROOMS[room](size)))

    capsys.readouterr()
    try:
        code = run_command([*words, f"stage={stage}"])
    finally:
        (disk / "filler").unlink()
    if code == 0:
        assert room in {"a result", "a result and a half", "three results"}
    else:
        said = capsys.readouterr().err
        assert "Traceback" not in said
        what, where, do = said.splitlines()[-3:]
        assert (code, what.partition(":")[0]) == (FAILED, "no room left on the disk") or (
            code == INVALID and ("will be written" in what or what.startswith("cannot write to "))
        )
        assert where.startswith("  where: ")
        assert do.startswith("  do:    ")
        assert "output_dir=" in do
        assert list(published.glob("[!.]*")) == []
        assert run_command([*words, f"stage={stage}"]) == 0
    assert read_files(disk, stage) == before
    assert list(published.glob(".*")) == []
