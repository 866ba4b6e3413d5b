"""Sums between Redis, files and the local store, through the command."""

import json
from pathlib import Path

import pytest
import torch
from integration.redis_parts import IDENTITY, SHAPES, WEIGHTS, assert_equal, close_stores, flush, make_part, open_store
from integration.redis_server import running
from safetensors.torch import save_file

from instruments.safetensors_files import save_tensors
from pipeline.store import main
from stages.accumulators.redis_store import PROJECTIONS, RedisStore
from stages.accumulators.sums import LocalStore, load_sums


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server, monkeypatch):
    shared_server.client().flushall()
    monkeypatch.setenv("TINY_ONN_REDIS_URL", shared_server.url)
    yield shared_server
    close_stores()


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
    file = tmp_path / "sums.safetensors"
    assert command("export", file, "--namespace", "t:") == (0, f"2 batches, 10 tokens in {file}\n")
    assert_equal(load_sums(file, do="")[0], part)
    told = f"2 batches, 10 tokens in Redis at 127.0.0.1:{server.port}, database 0\n"
    assert command("import", file, "--namespace", "copy:") == (0, told)
    assert command("import", file, "--namespace", "copy:") == (0, told)  # a second import changes nothing
    copy = open_store(server.url, "copy:")
    assert_equal(copy.collect(), part)


def test_the_local_store_goes_on_from_an_export(server, command, tmp_path):
    flush(open_store(server.url), 0, 1)
    assert command("export", tmp_path / "sums.0.safetensors", "--namespace", "t:", "--url", server.url)[0] == 0
    local = LocalStore(tmp_path, SHAPES, identity=IDENTITY, weights=WEIGHTS, every=0)
    local.sums.add(make_part(2))
    assert_equal(local.collect(), make_part(0, 1, 2))


def test_redis_goes_on_from_a_local_store(server, command, tmp_path):
    for worker in range(2):
        local = LocalStore(tmp_path, SHAPES, identity=IDENTITY, weights=WEIGHTS, every=0, worker=worker, workers=2)
        local.sums.add(make_part(worker))
        local.flush()
        assert command("import", tmp_path / f"sums.{worker}.safetensors", "--namespace", "t:")[0] == 0
    store = flush(open_store(server.url), 2)
    assert_equal(store.collect(), make_part(0, 1, 2))


def test_files_of_overlapping_batches_or_another_scan_are_refused(server, command, tmp_path):
    store = flush(open_store(server.url), 0, 1)
    local = LocalStore(tmp_path, SHAPES, identity=IDENTITY, weights=WEIGHTS, every=0)
    flush(local, 1, 2, 3)
    code, said = command("import", local.path, "--namespace", "t:")
    assert code == 1
    assert said.startswith("1 of the file's 3 batches are in Redis already")
    local.identity = json.dumps(IDENTITY | {"code": "c2"})
    local.flush()
    code, said = command("import", local.path, "--namespace", "t:")
    assert code == 1
    assert said.startswith("Redis holds sums of a scan with another code\n")
    assert_equal(store.collect(), make_part(0, 1))


def test_a_batch_that_another_worker_flushes_during_an_import_is_not_reported_as_imported(
    server, command, tmp_path, monkeypatch
):
    store, original = open_store(server.url), RedisStore.done

    def commit_after_the_question(asked):
        monkeypatch.setattr(RedisStore, "done", original)
        found = asked.done()
        store.commit(make_part(1))
        return found

    local = flush(LocalStore(tmp_path, SHAPES, identity=IDENTITY, weights=WEIGHTS, every=0), 1, 2)
    monkeypatch.setattr(RedisStore, "done", commit_after_the_question)
    code, said = command("import", local.path, "--namespace", "t:")
    assert (code, said.partition(":")[0]) == (1, "1 of the file's 2 batches are in Redis already")
    assert store.collect().done == {1}


@pytest.mark.parametrize("words", [("export", "sums.safetensors"), ("averages",)])
def test_a_namespace_without_a_scan(server, command, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    code, said = command(*words, "--namespace", "")
    assert code == 1
    assert said.startswith("there is no scan under the namespace (empty)\n")


def test_averages_beside_the_sums_change_no_sum(server, command):
    store = open_store(server.url)
    for batches in ([0], [0, 1]):  # the scan goes on, and the averages are written again
        flush(store, batches[-1])
        told = f"{len(batches)} batches, {5 * len(batches)} tokens in Redis at 127.0.0.1:{server.port}, database 0\n"
        assert command("averages", "--namespace", "t:") == (0, told)
        part = make_part(*batches)
        assert_equal(store.collect(), part)
        for projection, row in zip(PROJECTIONS, store.rows[-1], strict=True):
            sums = [part.tensors[name][-1, 2] for name in ("sum_abs", f"grad_norm_{projection}", "active_count")]
            counts = [part.counters[name] for name in ("tokens", "samples", "tokens")]
            found = server.client().hmget(f"{row}2", "avg_act", "avg_grad_norm", "freq_act")
            expected = [float(total) / count for total, count in zip(sums, counts, strict=True)]
            assert [float(value) for value in found] == pytest.approx(expected)


def test_files_that_cannot_be_read_or_written(server, command, tmp_path):
    torn, others, foreign = (tmp_path / name for name in ("torn", "others", "foreign"))
    torn.write_bytes(b"\0" * 20)
    save_file({"weight": torch.ones(2)}, others)
    save_tensors(foreign, {"weight": torch.ones(2)}, identity="{}", counters={}, done=[])
    for file in (tmp_path / "missing", torn, others, foreign):
        code, said = command("import", file, "--namespace", "t:")
        assert code == 1
        assert said.startswith(("unfinished sums cannot be read: ", "the file holds no sums of a scan: ")), said
    assert server.client().keys() == []
    code, said = command("export", tmp_path / "none" / "sums.safetensors", "--namespace", "t:")
    assert (code, said.startswith(f"there is no folder {tmp_path / 'none'}\n")) == (2, True), said
    open_store(server.url)
    if Path("/proc/sys").exists():  # a folder that not even root may write to
        code, said = command("export", "/proc/sys/sums.safetensors", "--namespace", "t:")
        assert code == 1
        assert said.startswith(("access denied: ", "the file cannot be read or written: ")), said


def test_a_flush_that_comes_while_all_is_read_is_whole_in_the_export(server, command, tmp_path, monkeypatch):
    """A commit marks batches before their sums are added: an export between the two would lose the sums."""
    store = flush(open_store(server.url), 0)
    original = RedisStore.read

    def read_after_a_commit(reader):
        monkeypatch.setattr(RedisStore, "read", original)
        store.commit(make_part(1))
        return reader.read()

    monkeypatch.setattr(RedisStore, "read", read_after_a_commit)
    file = tmp_path / "sums.safetensors"
    assert command("export", file, "--namespace", "t:") == (0, f"2 batches, 10 tokens in {file}\n")
    assert_equal(load_sums(file, do="")[0], make_part(0, 1))


def test_an_export_that_never_finds_rest_gives_up(server, command, tmp_path, monkeypatch):
    store, original, batches = open_store(server.url), RedisStore.read, iter(range(10))

    def read_after_a_commit(reader):
        store.commit(make_part(next(batches)))
        return original(reader)

    monkeypatch.setattr(RedisStore, "read", read_after_a_commit)
    code, said = command("export", tmp_path / "sums.safetensors", "--namespace", "t:")
    assert code == 1
    assert said.startswith("other workers flush to these sums faster than they can be read\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "held",
    ['{"layout": 7}', "words", "[]", "[" * 99_999, '{"layout": 4}'],
    ids=range(5),
)
def test_another_layout_is_refused(server, command, tmp_path, held):
    server.client().set("t:scan:identity", held)
    code, said = command("export", tmp_path / "sums.safetensors", "--namespace", "t:")
    assert code == 1
    assert said.startswith("the scan under the namespace t: has another layout than 4\n")


def test_a_server_that_is_gone_is_named_without_its_password(command, tmp_path, monkeypatch):
    monkeypatch.setattr("stages.accumulators.redis_connection.OPENING_TRIES", 0)
    monkeypatch.setenv("TINY_ONN_REDIS_URL", "redis://me:s3same@127.0.0.1:9")
    code, said = command("export", tmp_path / "sums.safetensors", "--namespace", "t:")
    assert code == 1
    assert said.startswith("the Redis server cannot be reached: ")
    assert "s3same" not in said
