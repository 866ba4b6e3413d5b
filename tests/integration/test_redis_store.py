"""Sums in a real Redis: each batch counts once, even if the server, a connection or a worker fails."""

import multiprocessing
import random
import time
from concurrent.futures import Future

import pytest
import torch
from integration.redis_parts import LAYERS, SHAPES, WIDTH, assert_equal, flush, make_part, open_store, scan_slowly
from integration.redis_proxy import LossyProxy
from integration.redis_server import running

from instruments.errors import ContractError, NumericsError, UserError
from stages.accumulators.sums import empty_sums

ROW = "t:param:model.layers.1.ffn.gate_proj.weight:row:7"
UP, DOWN = (ROW.replace("gate", name) for name in ("up", "down"))


def test_every_row_is_a_hash_of_running_sums(server):
    store = open_store(server.url)
    assert store.done() == set()
    flush(store, 0)
    flush(store, 1)
    assert store.done() == {0, 1}
    assert_equal(store.collect(), make_part(0, 1))
    part = store.collect().tensors
    client = server.client(decode_responses=True)
    for key, projection in ((ROW, "gate"), (UP, "up"), (DOWN, "down")):
        row = client.hgetall(key)
        assert float(row["sum_act"]) == part["sum_abs"][1, 7]
        assert float(row["count_act"]) == part["active_count"][1, 7]
        assert float(row["sum_grad_norm"]) == part[f"grad_norm_{projection}"][1, 7]
        assert len(row) == (6 if key == ROW else 3)
    totals = client.hgetall("t:scan:totals")
    assert [totals[name] for name in ("batches", "tokens", "samples", "loss_sum")] == ["2", "10", "4", "2"]
    assert float(totals["sum_abs:1"]) == part["sum_abs"][1].sum()
    assert client.dbsize() == LAYERS * 3 * WIDTH + LAYERS + len(("identity", "done", "totals"))


def test_the_namespace_may_be_empty_and_has_a_default(server):
    open_store(server.url, "").close()
    open_store(server.url, None).close()
    assert {key.decode() for key in server.client().scan_iter()} == {"scan:identity", "tiny_onn:pico:f1:scan:identity"}


@pytest.mark.parametrize(("size", "error"), [(1e-10, 1e-7), (6e-8, 1e-9), (1e-3, 1e-12), (1e9, 1e-14)])
def test_sums_keep_their_digits_down_to_17_decimals(server, size, error):
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
        torch.testing.assert_close(found.tensors[name], value, rtol=error, atol=0)


@pytest.mark.parametrize(("value", "where"), [(torch.inf, "not finite"), (1e-14, "too small for Redis")])
def test_sums_that_redis_cannot_keep_are_not_sent(server, value, where):
    store = open_store(server.url)
    part = make_part(2, 3)
    part.tensors["sum_sq"][0] = value
    store.sums.add(part)
    with pytest.raises(NumericsError, match=f"{where}.*: sum_sq\n  where: stage=scan, batches 2 to 3\n"):
        store.flush()
    assert store.done() == set()


def test_a_flush_that_somebody_else_made_is_dropped(server):
    first, second = open_store(server.url), open_store(server.url)
    flush(first, 0, 1)
    flush(second, 1, 2)
    assert second.done() == {0, 1}
    flush(second, 2)
    assert_equal(second.collect(), make_part(0, 1, 2))


def test_what_a_dead_worker_committed_is_added_by_the_next(server):
    dying = open_store(server.url)
    assert dying.commit(make_part(0, 1)) == "committed"
    assert dying.apply() == LAYERS - 1
    assert server.client().llen("t:scan:pending") == LAYERS - 1
    other = open_store(server.url)
    flush(other, 2)
    assert_equal(other.collect(), make_part(0, 1, 2))
    assert not server.client().exists("t:scan:pending")


def test_a_commit_may_be_repeated(server):
    store = open_store(server.url)
    assert [store.commit(make_part(0)) for _ in range(2)] == ["committed", "refused"]
    assert_equal(store.collect(), make_part(0))
    assert [store.apply(), store.commit(make_part(0))] == [0, "refused"]
    assert_equal(store.collect(), make_part(0))


@pytest.mark.parametrize("lost", ["t:scan:bits:0", "t:scan:identity"])
def test_what_the_server_lost_before_a_commit_is_sent_again(server, monkeypatch, lost):
    store = open_store(server.url)
    send, sent = store._send_bits, []

    def send_and_lose(bits_LRf):
        sent.append(list(send(bits_LRf)))
        if len(sent) == 1:
            server.client().delete(lost)
        return sent[-1]

    monkeypatch.setattr(store, "_send_bits", send_and_lose)
    flush(store, 0)
    assert len(sent) == 2
    assert_equal(store.collect(), make_part(0))


@pytest.mark.parametrize("seed", range(3))
def test_lost_answers_change_nothing(server, seed, monkeypatch):
    monkeypatch.setattr("redis.retry.sleep", lambda _seconds: None)
    proxy = LossyProxy(server.port, seed)
    store = open_store(proxy.url)
    for batch in range(12):
        flush(store, batch)
    assert_equal(store.collect(), make_part(*range(12)))
    assert proxy.broken > 5
    proxy.close()


def test_two_workers_at_once(server):
    workers = [start_worker(server, first, 12) for first in (0, 6)]
    for worker, _started in workers:
        worker.join(60)
        assert worker.exitcode == 0
    store = open_store(server.url)
    assert_equal(store.collect(), make_part(*range(12)))


def start_worker(server, first, batches):
    """A scan in a process that is forked from one that has imported torch; and the event of its start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stages.accumulators.redis_store"])
    started = context.Event()
    worker = context.Process(target=scan_slowly, args=(server.url, first, batches, 0.01, started))
    worker.start()
    return worker, started


@pytest.mark.parametrize("append_only", [True, False], ids=["append-only file", "no file: everything is lost"])
def test_workers_and_server_killed_at_random_moments(tmp_path, append_only):
    luck, batches, seen = random.Random(append_only), 80, []
    with running(tmp_path, append_only=append_only) as server:
        for kill in range(10):
            worker, started = start_worker(server, 8 * kill, batches)
            assert started.wait(60)
            time.sleep(luck.uniform(0.02, 0.2))
            if kill % 3 == 2:
                server.kill()
                time.sleep(0.02)
                server.start()  # the worker continues
                time.sleep(luck.uniform(0.1, 0.2))
            worker.kill()
            worker.join()
            seen.append(server.client().scard("t:scan:done"))
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
    store = open_store(server.url, every=0.15)
    assert not store.due()
    time.sleep(0.16)
    assert store.due()
    store.adding = Future()  # the server still adds the last flush
    assert not store.due()
    store.adding = None
    store.flush()
    assert not store.due()


STRANGE = {
    "a row of another type": lambda client: client.set(DOWN, "mine"),
    "a field that is no number": lambda client: client.hset(UP, "sum_grad_norm", "high"),
    "a maximum that is not finite": lambda client: client.hset(ROW, "max_abs", "inf"),
    **{
        f"{key} of another type": lambda client, key=f"t:scan:{key}": (client.delete(key), client.xadd(key, {"a": 1}))
        for key in ("done", "totals", "pending")
    },
}


@pytest.mark.parametrize("kind", STRANGE)
def test_keys_that_another_program_overwrote_stop_the_scan(server, kind):
    store = flush(open_store(server.url), 0)
    store.collect()
    STRANGE[kind](server.client())
    store.sums.add(make_part(1))
    with pytest.raises(UserError, match="changed by somebody else") as caught:
        [store.flush(), store.collect()]
    assert caught.value.do.startswith("the same command with stage=scan fresh=true")


def test_another_identity_is_refused_and_named(server):
    flush(open_store(server.url), 0)
    with pytest.raises(ContractError) as caught:
        open_store(server.url, identity={"scan": "f1", "code": "c2", "torch": "9.9"})
    assert caught.value.what.endswith("a scan with another code, torch")
    assert caught.value.where == f"Redis at 127.0.0.1:{server.port}, database 0, namespace t:"
    with pytest.raises(ContractError, match=r"a scan with another sums\n"):
        open_store(server.url, shapes=SHAPES | {"sum_abs": ((LAYERS, WIDTH + 1), torch.float64)})
    for held in ("mine", "3", "[" * 99_999):
        server.client().set("t:scan:identity", held)
        with pytest.raises(ContractError, match=r"a scan with another everything\n"):
            open_store(server.url)


def test_keys_that_no_scan_made_are_not_added_to(server):
    key = "t:param:model.layers.1.ffn.down_proj.weight:row:0"
    server.client().hset(key, "sum_act", 3)
    with pytest.raises(ContractError, match=f"the Redis key {key} is there, but no scan has begun"):
        open_store(server.url)


def test_fresh_deletes_this_namespace_and_no_other(server):
    flush(other := open_store(server.url, "other:"), 3)
    flush(old := open_store(server.url, identity={"scan": "f1", "code": "older"}), 0)
    old.collect()
    store = open_store(server.url, fresh=True)
    assert {key.decode() for key in server.client().keys("t:*")} == {"t:scan:identity"}
    assert b'"code": "c1"' in server.client().get("t:scan:identity")
    flush(store, 1)
    assert_equal(store.collect(), make_part(1))
    assert_equal(other.collect(), make_part(3))


OTHER_ROW = ROW.replace(":7", ":8")
ATTACKS = {
    "a little more": lambda client: client.hincrbyfloat(ROW, "sum_taylor", 0.125),
    "a field deleted": lambda client: client.hdel(ROW, "sum_sq"),
    "a row deleted": lambda client: client.delete(ROW),
    "a neuron deleted": lambda client: client.delete(*(ROW.replace("gate", part) for part in ("gate", "up", "down"))),
    "words": lambda client: client.hset(ROW, "sum_act", "evil"),
    "infinite": lambda client: client.hset(ROW, "sum_taylor", "inf"),
    "negative": lambda client: client.hset(ROW, "sum_taylor", -3),
    "negative, unseen in the total": lambda client: (
        client.hincrbyfloat(ROW, "sum_taylor", -1000), client.hincrbyfloat(OTHER_ROW, "sum_taylor", 1000)
    ),
    "a counter deleted": lambda client: client.hdel("t:scan:totals", "samples"),
    "a counter of nothing": lambda client: client.hset("t:scan:totals", "evil", 1),
    "totals deleted": lambda client: client.delete("t:scan:totals"),
    "a total overwritten": lambda client: client.hset("t:scan:totals", "sum_abs:0", 1),
    "a batch more": lambda client: client.sadd("t:scan:done", 5),
    "a batch less": lambda client: client.srem("t:scan:done", 0),
    "a counter that is none": lambda client: client.hset("t:scan:totals", "loss_sum", "nan"),
    "marks deleted": lambda client: client.delete("t:scan:done"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_sums_that_somebody_changed_are_refused(server, attack):
    store = flush(open_store(server.url), 0, 1)
    store.collect()
    ATTACKS[attack](server.client())
    with pytest.raises(ContractError) as caught:
        store.collect()
    assert caught.value.what.startswith("sums in Redis were changed by somebody else: ")
    assert caught.value.do == "the same command with stage=scan fresh=true, which starts the scan over"


@pytest.mark.parametrize("key", ["t:scan:identity", "t:scan:done", "t:scan:totals", ROW])
def test_fresh_starts_over_from_any_content(server, key):
    flush(open_store(server.url), 0).collect()  # waits for the thread that adds
    server.client().delete(key)
    server.client().xadd(key, {"a": 1})
    flush(store := open_store(server.url, fresh=True), 1)
    assert_equal(store.collect(), make_part(1))
