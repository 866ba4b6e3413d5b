"""The benchmark of the MoE's speed runs and reports every row; the figures of a tiny model have no meaning."""

import json
import math

import pytest
from benchmarks.__main__ import main
from benchmarks.moe_checkpoint import shape_of
from benchmarks.moe_profile import KINDS, kind_of
from pico import write_pico

from models.config import MoEShape

SHARES = ("50 % active", "30 % active")
COMPARED = [
    "prefill, dense",
    *(f"prefill, MoE {share}, {name} ÷ dense, tokens/s" for share in SHARES for name in ("grouped_mm", "eager")),
    "decode, dense",
    *(
        f"decode, MoE {share}, {name} ÷ dense, tokens/s"
        for share in SHARES
        for name in ("grouped_mm", "batched_mm", "eager")
    ),
]
PROFILED = [
    f"  {phase}, MoE {share}: {kind}"
    for share in SHARES
    for phase in ("prefill", "decode")
    for kind in (*KINDS, "the rest")
]


def test_every_row_is_measured(tmp_path):
    folder, found = write_pico(tmp_path / "pico", "qwen3", hidden=40, intermediate=80), tmp_path / "found.json"
    sizes = ["--tokens", "24", "--length", "8", "--repetitions", "1", "--device", "cpu"]
    moe = ["--experts", "5", "--active", "0.5", "0.3", "--steps", "2"]
    assert main(["--model", str(folder), *sizes, *moe, "--json", str(found), "--only", "moe"]) == 0
    rows = json.loads(found.read_text())["rows"]
    assert [row["what"] for row in rows] == COMPARED + PROFILED
    assert all(len(row["values"]) == 1 and math.isfinite(row["measured"]) for row in rows)
    assert rows[1]["note"].endswith("; 2 of 5 × 16 + 8")
    shares = [row["measured"] for row in rows if row["what"] in PROFILED]
    assert sum(shares) == pytest.approx(4)  # two models, two phases


def test_shapes_are_those_of_a_carve():
    assert shape_of(1024, 16, 0.5) == MoEShape(16, 64, 4, 256)
    assert shape_of(1024, 16, 0.25) == MoEShape(16, 64, 2, 128)


@pytest.mark.parametrize(
    ("operators", "kind"),
    [
        (["aten::_grouped_mm"], "experts' matrix products"),
        (["aten::mm", "aten::_grouped_mm"], "experts' matrix products"),
        (["aten::addmm"], "other matrix products"),
        (["aten::_scaled_dot_product_flash_attention_for_cpu"], "attention"),
        (["aten::sort"], "choosing experts, moving tokens"),
        (["aten::copy_"], "copies"),
        (["aten::silu"], "products by element, sums, norms"),
        (["aten::view"], "the rest"),
    ],
)
def test_operators_are_sorted_by_what_they_do(operators, kind):
    assert kind_of(operators) == kind
