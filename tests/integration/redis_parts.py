"""Small parts of a scan whose sums are exact in any order: multiples of 1/8, and integers."""

import time

import torch

from stages.accumulators.config import StoreConfig
from stages.accumulators.redis_store import open_redis_store
from stages.accumulators.sums import empty_sums

LAYERS, WIDTH, TOKENS, SLOTS = 2, 43, 5, 410
SUMS = ("sum_abs", "sum_sq", "max_abs", "sum_taylor", "grad_norm_gate", "grad_norm_up", "grad_norm_down")
SHAPES = {
    **{name: ((LAYERS, WIDTH), torch.float64) for name in SUMS},
    "active_count": ((LAYERS, WIDTH), torch.int64),
    "bits_LRf": ((LAYERS, SLOTS, (WIDTH + 7) // 8), torch.uint8),
}
IDENTITY = {"scan": "f1", "code": "c1"}
OPENED = []
WEIGHTS = [{name: f"model.layers.{n}.ffn.{name}_proj.weight" for name in ("gate", "up", "down")} for n in range(LAYERS)]


def make_part(*batches, tokens=TOKENS):
    """The sums of these batches; the same at every call."""
    part = empty_sums(SHAPES)
    for batch in batches:
        generator = torch.Generator().manual_seed(batch)
        one = empty_sums(SHAPES)
        for name in (*SUMS, "active_count"):
            eighths = torch.randint(0, 80, (LAYERS, WIDTH), generator=generator)
            one.tensors[name] = eighths / 8.0 if name in SUMS else eighths
        slots = slice(batch * tokens, (batch + 1) * tokens)
        size = one.tensors["bits_LRf"][:, slots].shape
        one.tensors["bits_LRf"][:, slots] = torch.randint(1, 256, size, generator=generator, dtype=torch.uint8)
        one.counters = {"tokens": float(tokens), "samples": 2.0, "loss_sum": batch + 0.5}
        one.done = {batch}
        part.add(one)
    return part


def open_store(url, namespace="t:", *, identity=IDENTITY, shapes=SHAPES, every=0.0, fresh=False):
    """A store of these parts for which a flush is always due."""
    config = StoreConfig("redis", every, url, namespace)
    store = open_redis_store(config, shapes, label="pico", identity=identity, weights=WEIGHTS, fresh=fresh)
    OPENED.append(store)
    return store


def close_stores():
    """Close all stores that a test has opened."""
    while OPENED:
        OPENED.pop().close()


def flush(store, *batches):
    """Add these batches and send them; returns the store."""
    store.sums.add(make_part(*batches))
    store.flush()
    return store


def assert_equal(found, wanted):
    """Compare bit for bit."""
    assert found.done == wanted.done
    assert found.counters == wanted.counters
    for name, value in wanted.tensors.items():
        assert torch.equal(found.tensors[name], value), name


def scan_slowly(url, first, batches, pause, started):
    """A worker that adds all missing batches, beginning at `first`, and flushes after every second one."""
    started.set()
    store = open_store(url)
    while missing := sorted(set(range(batches)) - store.done(), key=lambda batch: (batch < first, batch)):
        for at in range(0, len(missing), 2):
            time.sleep(pause)
            store.sums.add(make_part(*missing[at : at + 2]))
            store.flush()
    store.close()
