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
    skipped = {"too dull": ["a", "b", "c"], "too long": ["d"], "too blue": []}
    assert describe_skipped(skipped) == ["skipped 3 sequences (too dull: a, b, c)", "skipped 1 sequence (too long: d)"]


def test_many_names_are_counted():
    assert describe_skipped({"too dull": list("abcdefgh")}) == [
        "skipped 8 sequences (too dull: a, b, c, d, e and 3 more)"
    ]


WHERE = "  where: calibration text of a.jsonl"
SETTINGS = "data.labels=completion, data.max_length=16"
REMEDY = "  do:    data.labels=full_sequence, or data.max_length=32 if the answers begin after the cut"
MASKED, FIRST, SHORT = (
    "no token counts in the loss",
    "the only label is at the first token, which nothing predicts",
    "fewer than 2 tokens",
)


@pytest.mark.parametrize(
    ("skipped", "message"),
    [
        pytest.param(
            {MASKED: ["a", "b"], SHORT: ["c"]},
            "every label is masked: none of 2 sequences has a token that counts in the loss\n"
            f"{WHERE}, {SETTINGS}\n{REMEDY}",
            id="masked",
        ),
        pytest.param(
            {FIRST: ["a"], MASKED: ["b", "c"]},
            "every label is masked: none of 3 sequences has a token that counts in the loss; "
            f"in 1 of them the only label is at the first token, which nothing predicts\n{WHERE}, {SETTINGS}\n{REMEDY}",
            id="shifted away",
        ),
        pytest.param(
            {SHORT: ["c"]}, f"none of 1 sequences has 2 tokens\n{WHERE}\n  do:    name text that holds more", id="short"
        ),
        pytest.param(
            {},
            f"no document falls to the calibration text\n{WHERE}, data.heldout_share=0.1 of its documents held out\n"
            "  do:    text with more documents, another data.heldout_share, or data.heldout_path= held-out text of its "
            "own",
            id="nothing there",
        ),
    ],
)
def test_nothing_left(skipped, message):
    data = DataConfig(kind="text", path="a.jsonl", labels="completion", max_length=16)
    assert str(describe_nothing_left(data, "calibration", skipped)) == message
