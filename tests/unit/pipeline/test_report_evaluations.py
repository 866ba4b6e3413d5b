"""Which evaluations are comparable, and how they become curves."""

import json

import pytest
from unit.pipeline.report_outputs import GAPS, Outputs

from instruments.errors import ContractError
from pipeline.report.evaluations import (
    Point,
    curves_of,
    group_by_seed,
    read_evaluation,
    seeds_of,
)
from pipeline.report.words import shape_words


@pytest.fixture
def outputs(tmp_path):
    return Outputs(tmp_path)


def gaps(carved):
    return GAPS | {"carved": carved}


def test_an_evaluation_knows_its_shape_and_its_chain(outputs):
    evaluation = read_evaluation(outputs.carve(seed=3))
    assert (evaluation.share, evaluation.seed) == ((4 + 2 * 8) / 40, 3)
    assert list(evaluation.chain) == ["scan", "score", "cluster", "extract", "assemble", "project", "evaluate"]
    assert (evaluation.gap("carved"), evaluation.gap("random_router")) == (0.05, None)
    assert evaluation.settings["assemble.router"] == "ridge"
    assert not {"seed", "shape.n", "model.path", "cluster.map", "data.heldout_tokens"} & set(evaluation.settings)


def test_a_chain_with_a_gap_is_read_as_far_as_it_is_there(outputs):
    evaluation = read_evaluation(outputs.carve())
    (evaluation.chain["cluster"].folder / "manifest.json").unlink()
    assert "cluster" not in read_evaluation(evaluation.published.folder).chain


def test_a_damaged_evaluation_is_refused(outputs):
    folder = outputs.carve()
    (folder / "evaluation.json").write_text("{}")
    with pytest.raises(ContractError) as error:
        read_evaluation(folder)
    assert str(error.value) == (
        "no readable evaluation: KeyError('shape')\n"
        f"  where: {folder / 'evaluation.json'}\n"
        "  do:    run the stage again, with fresh=true"
    )


def test_only_the_same_source_on_the_same_text_is_comparable(outputs):
    wanted = outputs.carve()
    same = {wanted, outputs.carve(seed=1), outputs.carve(top_k=1), outputs.carve(label="renamed", router="random")}
    outputs.carve(identity="another model")
    other_text = outputs.carve(seed=5)
    record = json.loads((other_text / "evaluation.json").read_text())
    (other_text / "evaluation.json").write_text(json.dumps(record | {"heldout_tokens": 291}))
    (outputs.carve(seed=6) / "evaluation.json").write_text("damaged")
    found = read_evaluation(wanted).find_comparable()
    assert {evaluation.published.folder for evaluation in found} == same


def test_seeds_become_one_point_and_widths_a_curve(outputs):
    wanted = read_evaluation(outputs.carve(gaps=gaps(0.05)))
    outputs.carve(seed=1, gaps=gaps(0.07))
    outputs.carve(seed=1, map="umap", gaps=gaps(9.0))  # the same carve, plus a picture: counted once
    outputs.carve(top_k=3, gaps=gaps(0.01))
    outputs.carve(router="random", gaps=gaps(0.3))
    groups = group_by_seed([wanted, *wanted.find_comparable()])
    mine = [group for group in groups if wanted.is_same_method(group[0])]
    assert [(group[0].share, seeds_of(group)) for group in mine] == [(0.7, [0]), (0.5, [0, 1])]
    curves = curves_of(mine, list(wanted.models))
    assert list(curves) == ["carved", "static_mask", "static_mask_aligned", "oracle_aligned"]
    wide, narrow = curves["carved"]
    assert wide == Point(0.7, 0.01, 0.01, 0.01, 1)
    assert (narrow.low, narrow.count) == (0.05, 2)
    assert len(groups) == 3


def test_gaps_as_parts_of_the_static_masks(outputs):
    gaps = {"dense": 0.0, "carved": 0.05, "static_mask": 0.2, "random_router": 0.9}
    wanted = read_evaluation(outputs.carve(gaps=gaps))
    outputs.carve(seed=1, gaps=gaps | {"carved": 0.07})
    outputs.carve(top_k=4, gaps=gaps | {"carved": 0.0, "static_mask": 0.0})
    groups = group_by_seed(wanted.find_comparable())
    curves = curves_of(groups, list(gaps), "static_mask")
    assert list(curves) == ["carved", "static_mask", "random_router"]
    (point,) = curves["carved"]  # a static mask without a gap gives no ratio
    assert (point.x, point.mean, point.low, point.high) == pytest.approx((0.5, 0.3, 0.25, 0.35))
    assert curves_of(groups, list(gaps), "published") == {}


@pytest.mark.parametrize("changed", [{"tokens": 1800}, {"sample_tokens": 200}, {"text": "4321"}])
def test_other_calibration_text_is_another_carve(outputs, changed):
    wanted = read_evaluation(outputs.carve())
    outputs.carve(seed=1, **changed)
    groups = group_by_seed([wanted, *wanted.find_comparable()])
    assert [wanted.is_same_method(group[0]) for group in groups] == [True, False]


def test_a_pool_is_another_carve_and_says_so(outputs):
    wanted = read_evaluation(outputs.carve())
    pool = read_evaluation(outputs.carve(shape={"topology": "global_pool"}))
    assert shape_words(pool.shape) == "5 experts of 8 in one pool for all layers, 2 per token and 4 always-on neurons"
    groups = group_by_seed([wanted, pool])
    assert sorted(wanted.is_same_method(group[0]) for group in groups) == [False, True]
