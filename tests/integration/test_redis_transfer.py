"""Sums between Redis, files and the local store, through the command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from integration.redis_parts import IDENTITY, SHAPES, assert_equal, make_part, open_store
from integration.redis_server import running
from safetensors.torch import save_file

from pipeline.store import main
from stages.accumulators.redis_store import RedisStore
from stages.accumulators.store import LocalStore
from stages.accumulators.sums import load_sums

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server, monkeypatch):
    shared_server.client().flushall()
    monkeypatch.setenv("TINY_ONN_REDIS_URL", shared_server.url)
    return shared_server


@pytest.fixture
def command(capsys):
    def run(*words):
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_there_and_back(server, command, tmp_path):
    store = open_store(server.url)
    part = make_part(0, 1)
    store.commit(part)  # not added yet
    store.close()
    file = tmp_path / "sums.safetensors"
    assert command("export", file, "--namespace", "t:") == (0, f"2 batches, 10 tokens in {file}\n")
    assert_equal(load_sums(file)[0], part)
    told = f"2 batches, 10 tokens in Redis at 127.0.0.1:{server.port}, database 0\n"
    assert command("import", file, "--namespace", "copy:") == (0, told)
    assert command("import", file, "--namespace", "copy:") == (0, told)  # a second import changes nothing
    copy = open_store(server.url, "copy:")
    assert_equal(copy.collect(), part)
    copy.close()


def test_the_local_store_goes_on_from_an_export(server, command, tmp_path):
    store = open_store(server.url)
    store.sums.add(make_part(0, 1))
    store.flush()
    store.close()
    assert command("export", tmp_path / "sums.0.safetensors", "--namespace", "t:", "--url", server.url)[0] == 0
    local = LocalStore(tmp_path, SHAPES, identity=IDENTITY, every=0)
    local.sums.add(make_part(2))
    assert_equal(local.collect(), make_part(0, 1, 2))


def test_redis_goes_on_from_a_local_store(server, command, tmp_path):
    for worker in range(2):
        local = LocalStore(tmp_path, SHAPES, identity=IDENTITY, every=0, worker=worker, workers=2)
        local.sums.add(make_part(worker))
        local.flush()
        assert command("import", tmp_path / f"sums.{worker}.safetensors", "--namespace", "t:")[0] == 0
    store = open_store(server.url)
    store.sums.add(make_part(2))
    store.flush()
    assert_equal(store.collect(), make_part(0, 1, 2))
    store.close()


def test_a_namespace_is_dropped(server, command):
    for namespace in ("t:", "kept:"):
        store = open_store(server.url, namespace)
        store.sums.add(make_part(0, 1))
        store.flush()
        store.collect()
        store.close()
    assert command("drop", "--namespace", "t:") == (0, "2 batches deleted\n")
    assert not server.client().keys("t:*")
    assert len(server.client().keys("kept:*")) > 100


def test_files_of_overlapping_batches_or_another_scan_are_refused(server, command, tmp_path):
    store = open_store(server.url)
    store.sums.add(make_part(0, 1))
    store.flush()
    local = LocalStore(tmp_path, SHAPES, identity=IDENTITY, every=0)
    local.sums.add(make_part(1, 2, 3))
    local.flush()
    code, said = command("import", local.path, "--namespace", "t:")
    assert code == 1
    assert said.startswith("1 of the file's 3 batches are in Redis already")
    local.identity = json.dumps(IDENTITY | {"code": "c2"})
    local.flush()
    code, said = command("import", local.path, "--namespace", "t:")
    assert code == 1
    assert said.startswith("Redis holds sums of a scan with code c1 (here c2)\n")
    assert_equal(store.collect(), make_part(0, 1))
    store.close()


def test_a_namespace_without_a_scan(server, command, tmp_path):
    for words in (["export", tmp_path / "sums.safetensors"], ["drop"]):
        code, said = command(*words, "--namespace", "")
        assert code == 1
        assert said.startswith("there is no scan under the namespace (empty)\n")


def test_a_flush_that_comes_while_all_is_read_is_whole_in_the_export(server, command, tmp_path, monkeypatch):
    """A commit marks batches before their sums are added: an export between the two would lose the sums."""
    store = open_store(server.url)
    store.sums.add(make_part(0))
    store.flush()
    original = RedisStore.read

    def read_after_a_commit(reader):
        monkeypatch.setattr(RedisStore, "read", original)
        store.commit(make_part(1))
        return reader.read()

    monkeypatch.setattr(RedisStore, "read", read_after_a_commit)
    file = tmp_path / "sums.safetensors"
    assert command("export", file, "--namespace", "t:") == (0, f"2 batches, 10 tokens in {file}\n")
    assert_equal(load_sums(file)[0], make_part(0, 1))
    store.close()


def test_an_export_that_never_finds_rest_gives_up(server, command, tmp_path, monkeypatch):
    store = open_store(server.url)
    original, batches = RedisStore.read, iter(range(10))

    def read_after_a_commit(reader):
        store.commit(make_part(next(batches)))
        return original(reader)

    monkeypatch.setattr(RedisStore, "read", read_after_a_commit)
    file = tmp_path / "sums.safetensors"
    code, said = command("export", file, "--namespace", "t:")
    assert code == 1
    assert said.startswith("other workers flush to these sums faster than they can be read\n")
    assert not file.exists()
    store.close()


@pytest.mark.parametrize(
    "held",
    [
        '{"layout": 7}',
        "words",
        "[]",
        "[" * 99_999,
        '{"layout": 4}',
        '{"layout": 4, "weights": 1, "sums": {"sum_abs": [[99, 1000000000000], "float64"]}}',
    ],
    ids=range(6),
)
def test_another_layout_is_refused(server, command, tmp_path, held):
    server.client().set("t:scan:identity", held)
    for words in (["export", tmp_path / "sums.safetensors"], ["drop"]):
        code, said = command(*words, "--namespace", "t:")
        assert code == 1
        assert said.startswith("the scan under the namespace t: has another layout than 4\n")


@pytest.mark.parametrize("kind", ["missing", "torn", "of tensors", "of other tensors"])
def test_no_file_of_sums(server, command, tmp_path, kind):
    file = tmp_path / "sums.safetensors"
    if kind == "torn":
        file.write_bytes(b"\0" * 20)
    if kind.startswith("of"):
        facts = None if kind == "of tensors" else {"facts": '{"counters": {}, "done": []}'}
        save_file({"weight": torch.ones(2)}, file, metadata=facts)
    code, said = command("import", file, "--namespace", "t:")
    assert code == 1
    assert said.startswith("this file holds no sums of a scan: ")


def test_no_folder_to_write_to(server, command, tmp_path):
    code, said = command("export", tmp_path / "none" / "sums.safetensors", "--namespace", "t:")
    assert code == 2
    assert said.startswith(f"there is no folder {tmp_path / 'none'}\n")


def test_errors_of_the_server_are_found_before_torch_is_loaded(tmp_path):
    code = "import sys; from pipeline.store import main; print(main(), 'torch' in sys.modules)"
    words = ["export", "sums.safetensors", "--namespace", "t:", "--url", "redis://me:s3same@127.0.0.1:9"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "1 False\n"
    assert done.stderr.startswith("the Redis server cannot be reached: ")
    assert "s3same" not in done.stderr


@pytest.mark.skipif(not Path("/proc/sys").exists(), reason="needs a folder that not even root may write to")
def test_a_folder_nobody_may_write_to(server, command):
    open_store(server.url).close()
    code, said = command("export", "/proc/sys/sums.safetensors", "--namespace", "t:")
    assert code == 1
    assert said.startswith(("access denied: ", "the file cannot be written: ")), said
