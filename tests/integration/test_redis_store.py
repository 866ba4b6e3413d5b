"""Sums in a real Redis: each batch counts once, even if the server, a connection or a worker fails."""

import json
import multiprocessing
import random
import time

import pytest
import torch
from integration.redis_parts import LAYERS, SHAPES, WIDTH, assert_equal, make_part, open_store, scan_slowly
from integration.redis_proxy import LossyProxy
from integration.redis_server import running

from instruments.errors import ContractError, NumericsError, UserError
from stages.accumulators.config import StoreConfig
from stages.accumulators.redis_store import open_redis_store
from stages.accumulators.sums import empty_sums

GATE, UP, DOWN = (f"t:param:model.layers.1.mlp.{name}_proj.weight:row:7" for name in ("gate", "up", "down"))


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server):
    shared_server.client().flushall()
    return shared_server


def flush(store, *batches):
    store.sums.add(make_part(*batches))
    store.flush()


def test_what_goes_in_comes_out(server):
    store = open_store(server.url)
    assert store.shared
    assert store.done() == set()
    flush(store, 0, 4)
    flush(store, 1)
    assert store.done() == {0, 1, 4}
    assert_equal(store.collect(), make_part(0, 1, 4))
    store.close()


def test_every_row_is_a_hash_of_running_sums(server):
    store = open_store(server.url)
    flush(store, 0)
    flush(store, 1)
    part = store.collect().tensors
    client = server.client(decode_responses=True)
    for key, projection in ((GATE, "gate"), (UP, "up"), (DOWN, "down")):
        row = client.hgetall(key)
        assert float(row["sum_act"]) == part["sum_abs"][1, 7]
        assert float(row["count_act"]) == part["active_count"][1, 7]
        assert float(row["sum_grad_norm"]) == part[f"grad_norm_{projection}"][1, 7]
    assert client.hgetall(GATE).keys() == {"sum_act", "count_act", "sum_grad_norm", "sum_sq", "sum_taylor", "max_abs"}
    assert client.hgetall(UP).keys() == {"sum_act", "count_act", "sum_grad_norm", "max_abs"}
    assert client.hgetall(DOWN).keys() == {"sum_act", "count_act", "sum_grad_norm"}
    assert client.hgetall("t:scan:counters") == {"tokens": "10", "samples": "4", "loss_sum": "2"}
    rows = LAYERS * 3 * WIDTH
    assert client.dbsize() == rows + LAYERS + len(("identity", "done", "counters", "totals"))
    store.close()


def test_the_namespace_is_free_to_choose_and_may_be_empty(server):
    open_store(server.url, "").close()
    open_redis_store(
        StoreConfig("redis", 0.0, server.url), SHAPES, label="pico", identity={"scan": "f1"}, weights=[]
    ).close()
    assert {key.decode() for key in server.client().scan_iter()} == {"scan:identity", "tiny_onn:pico:f1:scan:identity"}


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e-20, 3e-12, 5.9e-8, 6e-8, 1e-3, 1e9])
def test_sums_of_any_size_keep_their_digits(server, size):
    store = open_store(server.url)
    total = empty_sums(SHAPES)
    for batch in range(5):
        part = make_part(batch)
        for name in ("sum_abs", "sum_sq", "sum_taylor", "grad_norm_gate", "grad_norm_up", "grad_norm_down"):
            part.tensors[name] = part.tensors[name] * size / 3
        total.add(part)
        store.sums.add(part)
        store.flush()
    found = store.collect()
    for name, value in total.tensors.items():
        torch.testing.assert_close(found.tensors[name], value, rtol=1e-9, atol=0)
    store.close()


def test_a_flush_that_somebody_else_made_is_dropped(server):
    first, second = open_store(server.url), open_store(server.url)
    flush(first, 0, 1)
    flush(second, 1, 2)
    assert second.done() == {0, 1}
    flush(second, 2)
    assert_equal(second.collect(), make_part(0, 1, 2))
    assert not server.client().keys("t:scan:staged:*")
    first.close()
    second.close()


def test_what_a_dead_worker_committed_is_added_by_the_next(server):
    dying = open_store(server.url)
    part = make_part(0, 1)
    names = dying.namespace.stage("flush", part)
    assert dying.namespace.commit(names, part) == "committed"
    dying.namespace.apply(names[0])
    other = open_store(server.url)
    flush(other, 2)
    assert_equal(other.collect(), make_part(0, 1, 2))
    assert not server.client().exists("t:scan:pending")
    assert not server.client().keys("t:scan:staged:*")
    dying.close()
    other.close()


def test_what_a_dead_worker_staged_counts_for_nothing_and_goes_away(server):
    dying = open_store(server.url)
    dying.namespace.stage("flush", make_part(0))
    client = server.client()
    assert all(0 < client.ttl(key) <= 900 for key in client.keys("t:scan:staged:*"))
    assert dying.done() == set()
    assert_equal(dying.collect(), empty_sums(SHAPES))
    dying.close()


def test_every_step_may_be_repeated(server):
    store = open_store(server.url)
    space, part = store.namespace, make_part(0)
    names = space.stage("flush", part)
    assert [space.commit(names, part), space.commit(names, part)] == ["committed", "committed"]
    assert space.apply(names[0]) > 0
    assert space.apply(names[0]) == 0
    assert space.commit(names, part) == "committed"
    for name in names:
        space.apply(name)
    assert space.commit(names, part) == "refused"
    assert_equal(store.collect(), part)
    store.close()


def test_chunks_that_expired_are_staged_again(server, monkeypatch):
    store = open_store(server.url)
    stage, calls = store.namespace.stage, []

    def stage_and_lose(flush_id, part):
        calls.append(stage(flush_id, part))
        if len(calls) == 1:
            server.client().delete(store.namespace.keys.chunk(calls[0][0]))
        return calls[-1]

    monkeypatch.setattr(store.namespace, "stage", stage_and_lose)
    flush(store, 0)
    assert len(calls) == 2
    assert_equal(store.collect(), make_part(0))
    store.close()


@pytest.mark.parametrize("seed", range(3))
def test_lost_answers_change_nothing(server, seed):
    proxy = LossyProxy(server.port, seed)
    store = open_store(proxy.url)
    for batch in range(12):
        flush(store, batch)
    assert_equal(store.collect(), make_part(*range(12)))
    assert proxy.broken > 5
    store.close()
    proxy.close()


def test_two_workers_at_once(server):
    context = forking()
    started = context.Event()
    workers = [context.Process(target=scan_slowly, args=(server.url, first, 12, 0.01, started)) for first in (0, 6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    store = open_store(server.url)
    assert_equal(store.collect(), make_part(*range(12)))
    store.close()


def forking():
    """Processes that are forked from a process that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stages.accumulators.redis_store"])
    return context


@pytest.mark.parametrize("append_only", [True, False], ids=["append-only file", "no file: everything is lost"])
def test_workers_and_server_killed_at_random_moments(tmp_path, append_only):
    luck, batches, seen = random.Random(append_only), 80, []
    with running(tmp_path, append_only=append_only) as server:
        for kill in range(10):
            started = forking().Event()
            worker = forking().Process(target=scan_slowly, args=(server.url, 8 * kill, batches, 0.01, started))
            worker.start()
            assert started.wait(60)
            time.sleep(luck.uniform(0.02, 0.2))
            if kill % 3 == 2:
                server.kill()
                time.sleep(0.02)
                server.start()  # the worker continues
                time.sleep(luck.uniform(0.1, 0.2))
            worker.kill()
            worker.join()
            seen.append(len(server.client().get("t:scan:done") or ""))
        assert any(seen), "no worker came as far as a flush"
        scan_slowly(server.url, 0, batches, 0, started)
        store = open_store(server.url)
        assert_equal(store.collect(), make_part(*range(batches)))
        store.close()


def test_a_server_that_forgets_everything_is_filled_again(tmp_path):
    with running(tmp_path, append_only=False) as server:
        store = open_store(server.url)
        flush(store, 0)
        store.collect()
        server.kill()
        server.start()
        flush(store, 1)
        assert store.done() == {1}
        flush(store, 0)
        assert_equal(store.collect(), make_part(0, 1))
        store.close()


def test_due_waits_for_the_time_and_for_the_server(server):
    settings = StoreConfig("redis", 0.15, server.url, "t:")
    store = open_redis_store(settings, SHAPES, label="pico", identity={"scan": "f1"}, weights=[])
    assert not store.due()
    time.sleep(0.16)
    assert store.due()
    store.flush()
    assert not store.due()
    store.close()


def test_a_row_of_another_type_stops_the_flush_and_loses_nothing(server):
    store = open_store(server.url)
    flush(store, 0)
    store.collect()
    row = server.client().dump(DOWN)
    server.client().set(DOWN, "mine")
    store.sums.add(make_part(1))
    store.flush()
    with pytest.raises(UserError) as caught:
        store.collect()
    assert str(caught.value) == (
        f"a Redis key under the scan's namespace is of another type: {DOWN}\n"
        f"  where: Redis at 127.0.0.1:{server.port}, database 0, namespace t:\n"
        "  do:    the same command with stage=scan fresh=true, which starts the scan over; "
        "or another store.namespace"
    )
    server.client().restore(DOWN, 0, row, replace=True)
    assert_equal(store.collect(), make_part(0, 1))
    store.close()


def test_a_field_that_is_no_number_stops_the_flush_and_loses_nothing(server):
    store = open_store(server.url)
    flush(store, 0)
    total = store.collect()
    server.client().hset(UP, "sum_grad_norm", "high")
    flush(store, 1)
    with pytest.raises(UserError) as caught:
        store.collect()
    assert str(caught.value) == (
        f"sums in Redis were changed by somebody else: a field is not a number | key {UP}\n"
        f"  where: Redis at 127.0.0.1:{server.port}, database 0, namespace t:\n"
        "  do:    the same command with stage=scan fresh=true, which starts the scan over"
    )
    server.client().hset(UP, "sum_grad_norm", repr(float(total.tensors["grad_norm_up"][1, 7])))
    assert_equal(store.collect(), make_part(0, 1))
    store.close()


@pytest.mark.parametrize("key", ["done", "counters", "totals", "pending"])
def test_a_ledger_of_another_type_stops_the_flush_before_anything_is_written(server, key):
    store = open_store(server.url)
    server.client().xadd(f"t:scan:{key}", {"a": 1})
    store.sums.add(make_part(0))
    with pytest.raises(UserError) as caught:
        store.flush()
    assert caught.value.what == f"a Redis key under the scan's namespace is of another type: t:scan:{key} is a stream"
    server.client().delete(f"t:scan:{key}")
    store.flush()
    assert_equal(store.collect(), make_part(0))
    store.close()


def test_pending_sums_that_somebody_deleted_are_missed(server):
    store = open_store(server.url)
    part = make_part(0)
    names = store.namespace.stage("flush", part)
    store.namespace.commit(names, part)
    server.client().delete(f"t:scan:staged:{names[0]}")
    with pytest.raises(ContractError) as caught:
        store.collect()
    assert str(caught.value) == (
        "sums that wait in Redis were deleted by somebody else: t:scan:staged:flush:0\n"
        f"  where: Redis at 127.0.0.1:{server.port}, database 0, namespace t:\n"
        "  do:    the same command with stage=scan fresh=true, which starts the scan over"
    )
    store.close()


def test_another_identity_is_refused_and_named(server):
    flush(first := open_store(server.url), 0)
    first.close()
    with pytest.raises(ContractError) as caught:
        open_store(server.url, identity={"scan": "f1", "code": "c2", "torch": "9.9"})
    assert str(caught.value) == (
        "Redis holds sums of a scan with code c1 (here c2), torch unset (here 9.9)\n"
        f"  where: Redis at 127.0.0.1:{server.port}, database 0, namespace t:\n"
        "  do:    the same command with stage=scan fresh=true, which starts the scan over; "
        "another store.namespace; or the code that began this scan"
    )
    with pytest.raises(ContractError, match=r"a scan with another sums\n"):
        open_store(server.url, shapes=SHAPES | {"sum_abs": ((LAYERS, WIDTH + 1), torch.float64)})
    for held in ("mine", "[]", "3", "[" * 99_999, '{"facts": 3}'):
        server.client().set("t:scan:identity", held)
        with pytest.raises(ContractError, match=r"a scan with an identity that is no scan's\n"):
            open_store(server.url)


def test_keys_that_no_scan_made_are_not_added_to(server):
    key = "t:param:model.layers.1.mlp.down_proj.weight:row:0"
    server.client().hset(key, "sum_act", 3)
    with pytest.raises(ContractError) as caught:
        open_store(server.url)
    assert str(caught.value) == (
        f"the Redis key {key} is there, but no scan has begun under this namespace\n"
        f"  where: Redis at 127.0.0.1:{server.port}, database 0, namespace t:\n"
        "  do:    another store.namespace, or delete all keys under this one"
    )


def test_fresh_deletes_this_namespace_and_no_other(server):
    flush(other := open_store(server.url, "other:"), 3)
    flush(old := open_store(server.url, identity={"scan": "f1", "code": "older"}), 0)
    old.collect()
    store = open_store(server.url, fresh=True)
    assert {key.decode() for key in server.client().keys("t:*")} == {"t:scan:identity"}
    assert json.loads(server.client().get("t:scan:identity"))["facts"]["code"] == "c1"
    flush(store, 1)
    assert_equal(store.collect(), make_part(1))
    assert_equal(other.collect(), make_part(3))
    for each in (other, old, store):
        each.close()


def test_sums_that_are_not_finite_are_not_sent(server):
    store = open_store(server.url)
    part = make_part(2, 3)
    part.tensors["sum_sq"][0, 5] = torch.inf
    store.sums.add(part)
    with pytest.raises(NumericsError) as caught:
        store.flush()
    assert str(caught.value) == (
        "sums that are not finite: sum_sq\n"
        "  where: stage=scan, batches 2 to 3\n"
        "  do:    model.dtype=float32 or bfloat16"
    )
    store.close()


ROW = "t:param:model.layers.1.mlp.gate_proj.weight:row:7"
OTHER_ROW = "t:param:model.layers.1.mlp.gate_proj.weight:row:8"
ATTACKS = {
    "a field overwritten": lambda client: client.hset(ROW, "sum_act", 4096),
    "a little more": lambda client: client.hincrbyfloat(ROW, "sum_taylor", 0.125),
    "a maximum overwritten": lambda client: client.hset(ROW, "max_abs", 4096),
    "a maximum deleted": lambda client: client.hdel(ROW, "max_abs"),
    "a field deleted": lambda client: client.hdel(ROW, "sum_sq"),
    "a row deleted": lambda client: client.delete(ROW),
    "a neuron deleted": lambda client: client.delete(*(ROW.replace("gate", part) for part in ("gate", "up", "down"))),
    "a row copied": lambda client: client.copy(OTHER_ROW, ROW, replace=True),
    "words": lambda client: client.hset(ROW, "sum_act", "evil"),
    "not a number": lambda client: client.hset(ROW, "sum_act", "nan"),
    "infinite": lambda client: client.hset(ROW, "sum_taylor", "inf"),
    "negative": lambda client: client.hset(ROW, "sum_taylor", -3),
    "negative, unseen in the total": lambda client: (
        client.hincrbyfloat(ROW, "sum_taylor", -1000), client.hincrbyfloat(OTHER_ROW, "sum_taylor", 1000)
    ),
    "tiny ones": lambda client: client.hset(ROW, "sum_act_tiny", "1e40"),
    "a counter overwritten": lambda client: client.hset("t:scan:counters", "tokens", 1),
    "a counter deleted": lambda client: client.hdel("t:scan:counters", "samples"),
    "a counter that is none": lambda client: client.hset("t:scan:counters", "loss_sum", "nan"),
    "all counters deleted": lambda client: client.delete("t:scan:counters"),
    "a counter of nothing": lambda client: client.hset("t:scan:counters", "evil", 1),
    "totals deleted": lambda client: client.delete("t:scan:totals"),
    "a total overwritten": lambda client: client.hset("t:scan:totals", "sum_abs:0", 1),
    "a copy overwritten": lambda client: client.hset(DOWN, "sum_act", 4096),
    "a copy a little more": lambda client: client.hincrbyfloat(UP, "count_act", 1),
    "a copy deleted": lambda client: client.hdel(UP, "sum_act"),
    "a copy of words": lambda client: client.hset(DOWN, "count_act", "evil"),
    "a field of no sum": lambda client: client.hset(ROW, "avg_act", "evil"),
    "a field that belongs to another projection": lambda client: client.hset(DOWN, "sum_sq", 1),
    "a row of no neuron": lambda client: client.copy(ROW, ROW.replace(":7", f":{WIDTH}")),
    "a row of no number": lambda client: client.hset(ROW + "x", "sum_act", 1),
    "a row of no weight": lambda client: client.copy(ROW, ROW.replace("layers.1", "layers.9")),
    "a total of nothing": lambda client: client.hset("t:scan:totals", "sum_abs:9", 1),
    "bits overwritten": lambda client: client.setrange("t:scan:bits:0", 0, b"\xff" * 9),
    "bits deleted": lambda client: client.delete("t:scan:bits:1"),
    "more bits than there is room for": lambda client: client.setbit("t:scan:bits:1", 2**20, 1),
    "a batch more": lambda client: client.setbit("t:scan:done", 5, 1),
    "a batch far away": lambda client: client.setbit("t:scan:done", 2**25, 1),
    "a batch moved": lambda client: (client.setbit("t:scan:done", 0, 0), client.setbit("t:scan:done", 2, 1)),
    "a batch moved far": lambda client: (client.setbit("t:scan:done", 0, 0), client.setbit("t:scan:done", 2**25, 1)),
    "a batch less": lambda client: client.setbit("t:scan:done", 0, 0),
    "marks deleted": lambda client: client.delete("t:scan:done"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_sums_that_somebody_changed_are_refused_and_fresh_starts_over(server, attack):
    store = open_store(server.url)
    flush(store, 0, 1)
    store.collect()
    ATTACKS[attack](server.client())
    with pytest.raises(ContractError) as caught:
        store.collect()
    assert caught.value.what.startswith("sums in Redis were changed by somebody else: ")
    assert caught.value.do == "the same command with stage=scan fresh=true, which starts the scan over"
    store.close()
    store = open_store(server.url, fresh=True)
    flush(store, 0)
    assert_equal(store.collect(), make_part(0))
    store.close()


@pytest.mark.parametrize("key", ["t:scan:identity", "t:scan:done", "t:scan:pending", "t:scan:totals", ROW])
def test_fresh_starts_over_from_any_content(server, key):
    store = open_store(server.url)
    flush(store, 0)
    store.collect()
    store.close()
    server.client().delete(key)
    server.client().xadd(key, {"a": 1})
    store = open_store(server.url, fresh=True)
    flush(store, 1)
    assert_equal(store.collect(), make_part(1))
    store.close()
