"""The benchmark of the MoE's speed runs and reports every row; the figures of a tiny model have no meaning."""

import json
import math

import pytest
from benchmarks.__main__ import main
from benchmarks.moe_speed import shape_of
from pico import write_pico

from models.config import MoEShape

SHARES = ("50 % active", "30 % active")
WAYS = {"prompt": ("grouped_mm", "eager"), "decode": ("grouped_mm", "batched_mm", "eager")}
COMPARED = [
    row
    for sequences in (1, 32)
    for phase, what in (("prompt", f"prompt, {sequences} × 8"), ("decode", f"decode, {sequences} at once"))
    for row in (
        f"{what}, dense",
        *(f"{what}, MoE {share}, {name} ÷ dense, tokens/s" for share in SHARES for name in WAYS[phase]),
    )
]


@pytest.mark.slow
def test_every_row_is_measured(tmp_path):
    folder, found = write_pico(tmp_path / "pico", "qwen3", hidden=40, intermediate=80), tmp_path / "found.json"
    sizes = ["--tokens", "24", "--length", "8", "--repetitions", "1", "--device", "cpu"]
    moe = ["--experts", "5", "--active", "0.5", "0.3", "--steps", "2"]
    assert main(["--model", str(folder), *sizes, *moe, "--json", str(found), "--only", "moe"]) == 0
    rows = json.loads(found.read_text())["rows"]
    assert [row["what"] for row in rows] == COMPARED
    assert all(len(row["values"]) == 1 and math.isfinite(row["measured"]) for row in rows)
    assert rows[1]["note"].endswith("; 2 of 5 × 16 + 8")


def test_shapes_are_those_of_a_carve():
    assert shape_of(1024, 16, 0.5) == MoEShape(16, 64, 4, 256)
    assert shape_of(1024, 16, 0.25) == MoEShape(16, 64, 2, 128)
