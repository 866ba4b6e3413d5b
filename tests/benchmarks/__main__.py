"""Speed and memory, as ratios measured in one run.

make bench                                       # the embedded model
make bench ARGS="--model /models/qwen --tokens 2048"
make bench ARGS="--shape qwen3-1.7b --random"    # random weights on a GPU
"""

import json
import platform
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec

import torch
from benchmarks.carve_memory import measure_carve
from benchmarks.dump_speed import measure_dump
from benchmarks.moe_speed import measure_moe
from benchmarks.peak_memory import measure_memory
from benchmarks.rows import Row, show_rows
from benchmarks.scan_speed import measure_forward, measure_scan
from benchmarks.scanner_speed import measure_mscan, measure_scanner
from benchmarks.watch_speed import measure_watch
from benchmarks.workbench import Workbench, make_workbench, read_options

from instruments.errors import UserError


def main(words: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if the model cannot be loaded."""
    words = list(sys.argv[1:] if words is None else words)
    options = read_options(words)
    try:
        bench = make_workbench(options)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    facts = _facts(bench, options)
    sys.stdout.write("\n".join(f"{name}: {value}" for name, value in facts.items()) + "\n")
    rows: list[Row] = []
    for group, measure in _measurements(bench, options, words).items():
        sys.stderr.write(f"measuring: {group}\n")
        rows += measure()
    sys.stdout.write(f"\n{show_rows(rows)}\n")
    if options.json:
        found = {"facts": facts, "rows": [row.record() for row in rows]}
        options.json.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return 0


def _measurements(bench: Workbench, options: Namespace, words: Sequence[str]) -> dict[str, Callable[[], list[Row]]]:
    """The requested groups that this machine can measure."""
    rounds = options.repetitions
    groups: dict[str, Callable[[], list[Row]]] = {
        "scan": lambda: measure_scan(bench, rounds),
        "forward": lambda: measure_forward(bench, rounds),
        "scanner": lambda: measure_scanner(bench, rounds),
        "memory": lambda: measure_memory(bench, options, words),
        "carve": measure_carve,
        "mscan": lambda: measure_mscan(bench, rounds),
        "redis": lambda: import_module("benchmarks.redis_speed").measure_redis(rounds),  # redis may be missing
        "moe": lambda: measure_moe(bench, options),
        "dump": lambda: measure_dump(bench, rounds),
        "watch": lambda: measure_watch(bench, rounds),
    }
    missing = {
        "memory": bench.device.type != "cuda" and platform.system() != "Linux" and "it reads /proc",
        "carve": platform.system() != "Linux" and "it reads /proc",
        "redis": _missing_redis(),
    }
    for group, reason in missing.items():
        if reason and group in options.only:
            sys.stderr.write(f"left out: {group} ({reason})\n")
    return {group: measure for group, measure in groups.items() if group in options.only and not missing.get(group)}


def _missing_redis() -> str:
    programs = [name for name in ("redis-server", "redis-benchmark") if shutil.which(name) is None]
    if programs:
        return f"no {' and no '.join(programs)} here"
    return "" if find_spec("redis") else "pip install -e '.[redis]'"


def _facts(bench: Workbench, options: Namespace) -> dict[str, object]:
    config, device = bench.model.config, bench.device
    hardware = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    sizes = (config.num_hidden_layers, config.hidden_size, bench.width, config.vocab_size)
    return {
        "model": f"{bench.name} (layers, hidden, intermediate, vocabulary {', '.join(map(str, sizes))})",
        "weights": f"{sum(weight.numel() for weight in bench.model.parameters()):,}, {bench.model.dtype}",
        "device": f"{device.type}, {hardware}, torch {torch.__version__}",
        "batch": " × ".join(map(str, bench.batch.input_ids.shape)),
        "repetitions": options.repetitions,
    }


if __name__ == "__main__":
    sys.exit(main())
