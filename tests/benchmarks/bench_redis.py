"""Speed of flushes to Redis, against redis-benchmark with the same pipelined command on the same server.

python tests/benchmarks/bench_redis.py
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from integration.redis_server import RedisServer, running  # noqa: E402

from stages.accumulators.config import StoreConfig  # noqa: E402
from stages.accumulators.redis_store import RedisStore, open_redis_store  # noqa: E402
from stages.accumulators.sums import ScanSums, empty_sums  # noqa: E402
from stages.scan.batch_sums import sum_shapes  # noqa: E402

LAYERS, WIDTH, RESERVOIR = 2, 4864, 256  # two layers of Qwen2.5-0.5B
COMMAND = (
    "HINCRBYFLOAT",
    "b:param:model.layers.0.mlp.gate_proj.weight:row:__rand_int__",
    "sum_grad_norm",
    "0.0123456789",
)
SPREAD = {"sum_abs": 1e2, "sum_sq": 1e3, "max_abs": 5.0, "sum_taylor": 1e-3}


def measure(rounds: int = 5) -> list[list[str]]:
    """Rows of name, median and target; flushes and redis-benchmark alternate, so that both meet the same load."""
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for kept in (False, True):
            with running(Path(folder) / str(kept), append_only=False) as server:
                if kept:
                    server.client().config_set("appendonly", "yes")  # with fsync once a second, the default
                found[kept] = [_one_round(server, number) for number in range(rounds)]
    rows = []
    for kept, rates in found.items():
        name = "with append-only file" if kept else "without"
        ours, theirs, longest = (statistics.median(column) for column in zip(*rates, strict=True))
        ratio = statistics.median(ours / theirs for ours, theirs, _ in rates)
        text = f"{ratio:.2f} ({ours / 1e3:.0f} k/s against {theirs / 1e3:.0f} k/s)"
        rows.append([f"Redis flush ÷ redis-benchmark HINCRBYFLOAT, {name}", text, "≥ 0.5"])
        rows.append([f"longest script, {name}", f"{longest * 1e3:.0f} ms", "≤ 200 ms"])
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
    options = [
        "-p",
        str(server.port),
        "-P",
        "100",
        "-c",
        str(clients),
        "-n",
        "150000",
        "-r",
        str(3 * LAYERS * WIDTH),
        "--csv",
    ]
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


if __name__ == "__main__":
    for row in measure():
        sys.stdout.write("  ".join(row) + "\n")
