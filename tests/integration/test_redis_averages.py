"""Averages of a scan's sums in Redis, through the command."""

import pytest
from integration.redis_parts import assert_equal, flush, make_part, open_store

from pipeline.store import main
from stages.accumulators.redis_store import PROJECTIONS


@pytest.fixture
def server(server, monkeypatch):
    monkeypatch.setenv("TINY_ONN_REDIS_URL", server.url)
    return server


@pytest.fixture
def command(capsys):
    def run(*words):
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_a_namespace_without_a_scan(server, command):
    code, said = command("averages", "--namespace", "")
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


@pytest.mark.parametrize(
    "held", ['{"layout": 7, "sums": {"a": [[1], "x"]}}', "words", "[]", "[" * 99_999, '{"layout": 4}'], ids=range(5)
)
def test_another_layout_is_refused(server, command, held):
    server.client().set("t:scan:identity", held)
    code, said = command("averages", "--namespace", "t:")
    assert code == 1
    assert said.startswith("the scan under the namespace t: has another layout than 4\n")


def test_a_server_that_is_gone_is_named_without_its_password(command, monkeypatch):
    monkeypatch.setattr("stages.accumulators.redis_connection.OPENING_TRIES", 0)
    monkeypatch.setenv("TINY_ONN_REDIS_URL", "redis://me:s3same@127.0.0.1:9")
    code, said = command("averages", "--namespace", "t:")
    assert code == 1
    assert said.startswith("the Redis server cannot be reached: ")
    assert "s3same" not in said
