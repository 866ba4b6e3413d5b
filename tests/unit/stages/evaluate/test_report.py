import json
import math
from dataclasses import replace

import pytest

from models.config import MoEShape
from stages.evaluate.report import Evaluation, LayerResult, ModelCost, notes, summarise, write_report
from stages.evaluate.samples import Sample
from stages.losses import MeanLoss

SHAPE = MoEShape(4, 8, 2, 16)


@pytest.fixture
def evaluation():
    return Evaluation(
        shape=SHAPE,
        width=64,
        lacking=0.0,
        heldout_tokens=1234,
        losses={
            "dense": MeanLoss(2468.0, 1234, None, None, ((1500.0, 700), (968.0, 534))),
            "carved": MeanLoss(2591.4, 1234, 0.05, 0.904, ((1600.0, 700), (991.4, 534))),
            "static_mask": MeanLoss(3085.0, 1234),
        },
        costs={"dense": ModelCost(2_000_000, 2_000_000, 5120.0), "carved": ModelCost(2_300_000, 1_600_000, None)},
        layers=[LayerResult(0.125, 0.75, 1.5, 0), LayerResult(0.25, 0.5, 2.5, 1)],
    )


def test_the_table_has_a_row_per_model(evaluation):
    table = summarise(evaluation)
    measured = ["perplexity", "loss gap (nats)", "±", "KL", "same token"]
    assert table.columns == ["model", *measured, "active parameters", "parameters", "tokens/s"]
    assert table.rows == [
        ["dense model", "7.389", "+0.0000", "–", "–", "–", "2.00 M", "2.00 M", "5,120"],
        ["this MoE", "8.166", "+0.1000", "0.0486", "0.0500", "90.4%", "1.60 M", "2.30 M", ""],
        ["static mask of the same width", "12.182", "+0.5000", "–", "–", "–", "", "", ""],
    ]
    assert "router agrees with the output oracle on 62% of its choices (chance 50%)" in table.notes[1]


def test_the_record(evaluation, tmp_path):
    write_report(evaluation, tmp_path)
    record = json.loads((tmp_path / "evaluation.json").read_text())
    shape = {"experts": 4, "n": 8, "top_k": 2, "always_on": 16, "topology": "per_layer", "dense_layers": []}
    assert record["shape"] == shape
    assert (record["dense_width"], record["heldout_tokens"]) == (64, 1234)
    assert record["models"]["carved"] == {
        "loss": pytest.approx(2.1),
        "perplexity": pytest.approx(math.exp(2.1)),
        "gap": pytest.approx(0.1),
        "gap_error": pytest.approx(0.0486, abs=1e-4),
        "kl": 0.05,
        "same_token": 0.904,
        "parameters": 2_300_000,
        "active_parameters": 1_600_000,
        "tokens_per_second": None,
    }
    assert record["models"]["static_mask"].keys() == {"loss", "perplexity", "gap", "gap_error", "kl", "same_token"}
    assert record["layers"][1] == {"error": 0.25, "agreement": 0.5, "imbalance": 2.5, "unused_experts": 1, "load": []}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trained": True}, "stage=train"),
        ({"dtype": "bfloat16"}, "model.dtype=float32"),
        ({"shape": replace(SHAPE, dense_layers=(1,))}, "layers 1 stay dense"),
        ({"shape": replace(SHAPE, topology="global_pool"), "dtype": "bfloat16"}, "one pool"),
    ],
)
def test_a_note_says_what_the_figures_do_not_compare(evaluation, changes, said):
    plain, found = notes(evaluation), notes(replace(evaluation, **changes))
    assert len(found) == len(plain) + 1
    assert said in found[-1]
    assert ("outputs 0.125;" in found[1]) == (said == "layers 1 stay dense")  # else the mean of two layers


def test_what_the_models_write_is_the_last_to_read(evaluation):
    samples = [Sample("for bird in\n", " flock:", " birds:"), Sample("x", "\x1b[2J", "é")]
    assert notes(replace(evaluation, samples=samples))[-2:] == [
        'prompt  "for bird in\\n"\ndense   " flock:"\nMoE     " birds:"',
        'prompt  "x"\ndense   "\\u001b[2J"\nMoE     "é"',
    ]
