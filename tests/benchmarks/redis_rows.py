"""Rows of the Redis store, measured on its own server."""

import re

from benchmarks.rows import Row


def measure_redis(rounds: int) -> list[Row]:
    """Rows of bench_redis.py, whose text begins with the figure; the import is here because redis may be missing."""
    from benchmarks.bench_redis import measure

    rows = []
    for what, text, target in measure(rounds):
        found = re.match(r"([\d.]+) ?(ms)?(.*)", text)
        assert found, text
        sign, bound = target.split()[:2]
        limit = {"≥": "at_least", "≤": "at_most"}[sign]
        rows.append(Row(what, [float(found[1])], unit=found[2] or "", note=found[3].strip(), **{limit: float(bound)}))
    return rows
