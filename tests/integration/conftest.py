"""Carves that are made once for all tests, and runs of the command that must fail."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from filelock import FileLock
from integration.carving import CARVES, OTHERS, TARGETS, Carve, make_carve, similar_lines
from integration.redis_parts import close_stores
from integration.redis_server import running
from pico import write_pico

from instruments.errors import FAILED
from pipeline.cli import run_command
from stages.text.config import DataConfig


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder that all workers of a test run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def text(shared) -> Path:
    """Similar but different paragraphs."""
    path = shared / "text.txt"
    with FileLock(shared / "text.lock"):
        if not path.exists():
            path.write_text("\n\n".join(similar_lines(400)))
    return path


class Carves(dict[str, Carve]):
    """Carves by name, each made at its first use. Read-only."""

    def __init__(self, folder: Path, text: Path) -> None:
        self.folder, self.text = folder, text

    def __missing__(self, name: str) -> Carve:
        source, *words = (CARVES | TARGETS | OTHERS)[name]
        record = self.folder / f"carve-{name}.json"
        with FileLock(self.folder / f"{source}.lock"):
            if not record.exists():
                made = make_carve(self.folder, self.text, source, *words)
                record.write_text(json.dumps([str(made.dense), str(made.folder), asdict(made.data)]))
        dense, folder, data = json.loads(record.read_text())
        self[name] = Carve(Path(dense), Path(folder), DataConfig(**data))
        return self[name]


@pytest.fixture(scope="session")
def carves(text, shared) -> Carves:
    """Carves of every family and of the embedded model."""
    for source in ("qwen3", "qwen2", "llama", "olmo2", "granite"):
        with FileLock(shared / f"{source}.lock"):
            if not (shared / source).exists():
                write_pico(shared / source, source, tie=source == "qwen3", tokenizer=True)
    return Carves(shared, text)


@pytest.fixture(scope="session")
def sound(tmp_path_factory) -> Path:
    """A sound checkpoint of several shards. Read-only."""
    folder = tmp_path_factory.mktemp("sound") / "sound"
    return write_pico(folder, "qwen3", tokenizer=True, max_shard_size="200KB")


@pytest.fixture
def source(sound, tmp_path) -> Path:
    """A sound checkpoint to damage."""
    return shutil.copytree(sound, tmp_path / "source")


@pytest.fixture
def failed(tmp_path, monkeypatch, capsys):
    """Run stage=scan, which must fail and publish nothing; returns its message, without progress bars."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        assert run_command(["stage=scan", *words, "output_dir=outputs"]) == FAILED
        written = {path.name for path in Path("outputs", "artifacts").rglob("*") if path.is_file()}
        assert written <= {"hashes.json", ".in_use"}  # cached hashes of the source's files, and the lock of the folder
        assert not Path("outputs", "latest").exists()
        return capsys.readouterr().err.rpartition("]\n")[2].lstrip("\n")

    return run


@pytest.fixture
def without_weights(monkeypatch):
    """Fail if the dense model is loaded."""
    monkeypatch.setattr("stages.scan.stage.load_dense", lambda *_: pytest.fail("the dense model was loaded"))


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory):
    """A Redis server whose settings no test changes."""
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server):
    """An empty Redis server; the stores that a test opens are closed."""
    shared_server.client().flushall()
    yield shared_server
    close_stores()
