"""Speed of flushes to Redis, against redis-benchmark with the same pipelined command on the same server."""

import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.rows import Row
from integration.redis_server import RedisServer, running

from stages.accumulators.config import StoreConfig
from stages.accumulators.redis_store import RedisStore, open_redis_store
from stages.accumulators.sums import ScanSums, empty_sums
from stages.scan.batch_sums import sum_shapes

LAYERS, WIDTH, RESERVOIR = 2, 4864, 256  # two layers of Qwen2.5-0.5B
ROW = "b:param:model.layers.0.mlp.gate_proj.weight:row:__rand_int__"
COMMAND = ("HINCRBYFLOAT", ROW, "sum_grad_norm", "0.0123456789")
SPREAD = {"sum_abs": 1e2, "sum_sq": 1e3, "max_abs": 5.0, "sum_taylor": 1e-3}


def measure_redis(rounds: int) -> list[Row]:
    """Rows without and with an append-only file; flushes and redis-benchmark alternate, so both meet the same load."""
    rows = []
    for name in ("without", "with append-only file"):
        with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "server", append_only=False) as server:
            server.client().config_set("appendonly", "no" if name == "without" else "yes")  # with fsync once a second
            found = [_one_round(server, number) for number in range(rounds)]
        ours, theirs, longest = (list(column) for column in zip(*found, strict=True))
        ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
        note = f"{statistics.median(ours) / 1e3:.0f} k/s against {statistics.median(theirs) / 1e3:.0f} k/s"
        rows.append(Row(f"Redis flush ÷ redis-benchmark HINCRBYFLOAT, {name}", ratios, at_least=0.5, note=note))
        rows.append(Row(f"longest script, {name}", [1e3 * value for value in longest], at_most=200, unit="ms"))
    return rows


def _one_round(server: RedisServer, number: int) -> tuple[float, float, float]:
    """Increments per second of flushes and of redis-benchmark, better of two each; seconds of the longest script."""
    references, flushes = [], []
    for turn, clients in enumerate((1, 50)):
        references.append(_reference(server, clients))
        flushes.append(_flush(server, 2 * number + turn))
    return max(rate for rate, _ in flushes), max(references), max(longest for _, longest in flushes)


def _flush(server: RedisServer, number: int) -> tuple[float, float]:
    """Increments per second until one flush is complete, and seconds of its longest script."""
    shapes = sum_shapes(LAYERS, WIDTH, RESERVOIR)
    weights = [
        {part: f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
        for layer in range(LAYERS)
    ]
    settings = StoreConfig("redis", 0.0, server.url, "b:")
    store: RedisStore = open_redis_store(settings, shapes, label="b", identity={"scan": "b"}, weights=weights)
    store.sums.add(_random_part(shapes, number))
    client = server.client()
    client.config_resetstat()
    client.config_set("slowlog-log-slower-than", 0)
    client.config_set("slowlog-max-len", 1000)
    client.slowlog_reset()
    start = time.perf_counter()
    store.flush()
    store._finish_adding()
    seconds = time.perf_counter() - start
    calls = client.info("commandstats")
    longest = max(call["duration"] for call in client.slowlog_get(1000)) / 1e6
    client.config_set("slowlog-log-slower-than", -1)
    added = sum(calls[name]["calls"] for name in ("cmdstat_hincrbyfloat", "cmdstat_hset"))
    store.close()
    return added / seconds, longest


def _reference(server: RedisServer, clients: int) -> float:
    options = f"-p {server.port} -P 100 -c {clients} -n 150000 -r {3 * LAYERS * WIDTH} --csv".split()
    done = subprocess.run(["redis-benchmark", *options, *COMMAND], capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1].split(",")[1].strip('"'))


def _random_part(shapes: dict, number: int) -> ScanSums:
    part = empty_sums(shapes)
    generator = torch.Generator().manual_seed(number)
    for name, (size, kind) in shapes.items():
        if kind == torch.float64:
            part.tensors[name] = torch.rand(size, dtype=kind, generator=generator) * SPREAD.get(name, 1e-2)
        else:
            part.tensors[name] = torch.randint(1, 200, size, generator=generator).to(kind)
    part.counters, part.done = {"tokens": 2048.0, "samples": 4.0, "loss_sum": 9.25}, {number}
    return part
