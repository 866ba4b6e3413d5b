import json

import pytest
import torch

from stages.accumulators.redis_layout import (
    FIELDS,
    Keys,
    _runs,
    columns_of,
    copied_columns,
    default_namespace,
    entries_to_add,
    entries_to_read,
    pack_cache_key,
    pack_chunks,
    unpack_neurons,
)
from stages.accumulators.redis_namespace import _differences
from stages.accumulators.sums import ScanSums

LAYER = {"gate": "m.gate.weight", "up": "m.up.weight", "down": "m.down.weight"}


def test_keys_are_those_of_the_specification():
    keys = Keys(default_namespace("qwen", "f00"))
    assert keys.layer_rows(LAYER) == [
        f"tiny_onn:qwen:f00:param:m.{projection}.weight:row:" for projection in ("gate", "up", "down")
    ]
    assert Keys("").rows("m.gate.weight") == "param:m.gate.weight:row:"
    assert Keys("a:").chunk("f:0") == "a:scan:staged:f:0"
    assert Keys("a:").bits(3) == "a:scan:bits:3"


def test_every_projection_carries_the_three_fields():
    for projection in ("gate", "up", "down"):
        fields = {field for places in FIELDS.values() for place, field in places if place == projection}
        assert {"sum_act", "sum_grad_norm", "count_act"} <= fields


def test_columns_follow_one_order_for_any_order_of_the_tensors():
    assert columns_of(["max_abs", "bits_LRf", "sum_abs"]) == ["sum_abs", "max_abs"]
    with pytest.raises(KeyError, match="no place in Redis for sum_cubes, sums"):
        columns_of(["sums", "sum_abs", "sum_cubes"])


def test_entries_name_projection_field_column_and_maximum():
    assert entries_to_add(["sum_abs", "max_abs"]) == [
        *(1, "sum_act", 1, 0),
        *(1, "max_abs", 2, 1),
        *(2, "sum_act", 1, 0),
        *(2, "max_abs", 2, 1),
        *(3, "sum_act", 1, 0),
    ]
    assert entries_to_read(["sum_abs", "grad_norm_down", "max_abs"]) == [
        *(1, "sum_act"),
        *(3, "sum_grad_norm"),
        *(1, "max_abs"),
        *(2, "sum_act"),
        *(3, "sum_act"),
        *(2, "max_abs"),
    ]
    assert copied_columns(["sum_abs", "grad_norm_down", "max_abs"]) == [0, 0, 2]


def test_sums_of_an_older_layout_are_named():
    sizes = {"sum_abs": [[1, 3], "float64"]}
    ours = pack_cache_key({"scan": "f"}, sizes, [LAYER])
    assert _differences(ours.replace('"layout": 3', '"layout": 2'), ours) == "layout 2 of its fields (here 3)"


def test_identity_is_one_text_for_one_scan():
    sizes = {"sum_abs": [[1, 3], "float64"]}
    first = pack_cache_key({"scan": "f", "code": "c"}, sizes, [LAYER])
    assert first == pack_cache_key({"code": "c", "scan": "f"}, sizes, [dict(reversed(LAYER.items()))])
    assert json.loads(first) == {
        "layout": 3,
        "facts": {"scan": "f", "code": "c"},
        "sums": {"sum_abs": [[1, 3], "float64"]},
        "weights": [LAYER],
    }


def test_runs_of_marks():
    assert _runs(torch.tensor([True, True, False, True, False, False, True])) == [(0, 2), (3, 4), (6, 7)]
    assert _runs(torch.zeros(3, dtype=torch.bool)) == []


@pytest.mark.parametrize("width", [1, 511, 512, 513, 1100])
def test_chunks_hold_every_neuron_once(width):
    sum_abs = torch.arange(2 * width, dtype=torch.float64).reshape(2, width)
    part = ScanSums({"sum_abs": sum_abs, "active_count": sum_abs.long() + 1}, done={0})
    chunks = list(pack_chunks(part, ["sum_abs", "active_count"], Keys("a:"), [LAYER, LAYER]))
    head = 12 + sum(len(prefix) + 1 for prefix in Keys("a:").layer_rows(LAYER))
    rows = torch.cat([unpack_neurons(chunk[head:], 2) for chunk in chunks])
    assert torch.equal(rows, torch.stack([sum_abs.flatten(), sum_abs.flatten() + 1], dim=1))
    firsts = [int.from_bytes(chunk[4:8], "little") for chunk in chunks]
    assert firsts == [first for _ in range(2) for first in range(0, width, 512)]


def test_only_the_tokens_of_the_part_are_written():
    bits = torch.zeros(1, 9, 2, dtype=torch.uint8)
    bits[0, 3:5, 1] = 7
    bits[0, 8, 0] = 1
    part = ScanSums({"sum_abs": torch.ones(1, 1, dtype=torch.float64), "bits_LRf": bits}, done={0})
    _neurons, first, second = pack_chunks(part, ["sum_abs"], Keys("a:"), [LAYER])
    zeros = bytes(4)
    assert first == zeros + (6).to_bytes(4, "little") + zeros + b"a:scan:bits:0\0" + bytes([0, 7, 0, 7])
    assert second == zeros + (16).to_bytes(4, "little") + zeros + b"a:scan:bits:0\0" + bytes([1, 0])
