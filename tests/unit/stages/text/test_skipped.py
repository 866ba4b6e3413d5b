import pytest

from stages.text.config import DataConfig
from stages.text.sequences import describe_nothing_left, describe_skipped, find_fault


@pytest.mark.parametrize(
    ("labels", "fault"),
    [
        ([], "fewer than 2 tokens"),
        ([5], "fewer than 2 tokens"),
        ([-100, -100, -100], "no token counts in the loss"),
        ([5, -100, -100], "the only label is at the first token, which nothing predicts"),
        ([-100, 5], None),
        ([5, 5], None),
    ],
)
def test_a_label_counts_only_behind_the_first_token(labels, fault):
    assert find_fault(labels) == fault


def test_what_was_skipped_in_words():
    skipped = {"too dull": list("abcdefgh"), "too long": ["d"], "too blue": []}
    assert describe_skipped(skipped) == [
        "skipped 8 sequences (too dull: a, b, c, d, e and 3 more)",
        "skipped 1 sequence (too long: d)",
    ]


MASKED, FIRST, SHORT = (
    "no token counts in the loss",
    "the only label is at the first token, which nothing predicts",
    "fewer than 2 tokens",
)


@pytest.mark.parametrize(
    ("skipped", "what", "do"),
    [
        ({MASKED: ["a", "b"], SHORT: ["c"]}, "every label is masked: none of 2 sequences", "data.max_length=32"),
        ({FIRST: ["a"], MASKED: ["b", "c"]}, f"in 1 of them {FIRST}", "data.labels=full_sequence"),
        ({SHORT: ["c"]}, "none of 1 sequences has 2 tokens", "name text that holds more"),
        ({}, "no document falls to the calibration text", "data.heldout_share"),
    ],
)
def test_nothing_left(skipped, what, do):
    data = DataConfig(kind="text", path="a.jsonl", labels="completion", max_length=16)
    error = describe_nothing_left(data, "calibration", skipped)
    assert what in error.what
    assert do in error.do


MASKED, FIRST, SHORT = (
    "no token counts in the loss",
    "the only label is at the first token, which nothing predicts",
    "fewer than 2 tokens",
)
