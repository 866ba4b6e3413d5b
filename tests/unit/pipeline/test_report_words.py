"""Verdict, names and numbers of the report."""

from dataclasses import replace

import pytest
from unit.pipeline.report_outputs import GAPS, Outputs

from pipeline.report.evaluations import read_evaluation
from pipeline.report.words import (
    Method,
    duration,
    key_figures,
    method_of,
    nats,
    percent,
    plain,
    shape_words,
    size,
    verdict,
)


@pytest.fixture
def told(tmp_path):
    def tell(**gaps):
        return verdict(read_evaluation(Outputs(tmp_path).carve(gaps={"dense": 0.0, **gaps})))

    return tell


OPENING = "Serving each token with 50\N{NO-BREAK SPACE}% of the FFN's neurons"


def test_the_verdict_on_a_good_carve(told):
    assert told(**{name: gap for name, gap in GAPS.items() if gap}) == (
        f"{OPENING} costs +0.0500 nats per token: 25\N{NO-BREAK SPACE}% of what a static mask of the same width costs "
        "and 50\N{NO-BREAK SPACE}% of what the aligned static mask costs. Choosing experts by their outputs, which no "
        "router can, would cost +0.0400."
    )


def test_the_verdict_on_a_bad_carve_is_as_plain(told):
    assert told(carved=0.3, static_mask=0.2) == (
        f"{OPENING} costs +0.3000 nats per token: a static mask of the same width does no worse (+0.2000)."
    )


def test_the_verdict_where_nothing_is_lost(told):
    assert told(carved=-0.01, random_router=0.5) == (
        f"{OPENING} costs nothing measurable (−0.0100 nats): a random router costs +0.5000."
    )
    assert told(carved=0.1) == f"{OPENING} costs +0.1000 nats per token."


def test_key_figures_leave_out_what_was_not_measured(tmp_path):
    gaps = {"dense": 0.0, "carved": 0.05}
    assert len(key_figures(read_evaluation(Outputs(tmp_path).carve(gaps=gaps)))) == 3
    assert key_figures(read_evaluation(Outputs(tmp_path).carve()))[-1] == (
        "25\N{NO-BREAK SPACE}%",
        "of the static mask's gap",
    )


def test_a_carve_with_dense_layers_says_so(tmp_path):
    found = read_evaluation(Outputs(tmp_path).carve())
    found = replace(found, shape=replace(found.shape, dense_layers=(1,)))
    assert shape_words(found.shape).endswith("; layers 1 stay dense")
    assert ", averaged over all layers: " in key_figures(found)[2][1]


def test_models_unknown_so_far_get_a_hue_of_their_own():
    names = ["dense", "wanda_mask", "wanda_mask_aligned", "published_router"]
    assert method_of("wanda_mask", names) == Method("wanda mask", "extra-0", "p", before=True)
    assert method_of("wanda_mask_aligned", names) == Method("wanda mask, aligned", "extra-0", "p")
    assert method_of("published_router", names) == Method("published router", "extra-1", "^")


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (nats(-0.05), "−0.0500"),
        (percent(0.5), "50\N{NO-BREAK SPACE}%"),
        (percent(0.0123), "1.2\N{NO-BREAK SPACE}%"),
        (percent(0.0), "0\N{NO-BREAK SPACE}%"),
        (duration(None), "–"),
        (duration(12.34), "12.3 s"),
        (duration(600), "10 min"),
        (duration(7200), "2.0 h"),
        (size(None), "–"),
        (size(3 << 20), "3 MiB"),
        (size(3 << 29), "1.5 GiB"),
        (plain(None), "–"),
        (plain(True), "True"),
        (plain(-12345), "−12,345"),
        (plain(0.123456), "0.1235"),
        (plain([1]), "[1]"),
    ],
)
def test_numbers_as_a_reader_wants_them(shown, wanted):
    assert shown == wanted
