"""Unreadable text, and text without tokens to learn from: refused before weights are loaded."""

import json

import pytest
from integration.wording import message


@pytest.fixture
def write_lines(tmp_path):
    """Write a .jsonl file."""

    def write(*records):
        path = tmp_path / "records.jsonl"
        path.write_text("\n".join(json.dumps(record) for record in records))
        return path

    return write


def nothing_left(split, path):
    return message(
        f"no document is left for the {split} text",
        f"{split} text of {path}, data.heldout_share=0.1",
        "text with more documents, another data.heldout_share, or other held-out text",
    )


@pytest.mark.parametrize(
    ("content", "splits"), [("\n \n\n", ("calibration", "heldout")), ("one paragraph", ("heldout",))]
)
def test_text_too_short_for_two_splits(refused, tmp_path, content, splits):
    path = tmp_path / "short.txt"
    path.write_text(content)
    assert refused("data=text", f"data.path={path}") == "\n".join(nothing_left(split, path) for split in splits)


def no_column(path, number):
    return message(
        "a record has neither column 'messages' nor column 'text'",
        f"{path}:{number}; its columns: body",
        "name a column of it: data.text_column= or data.messages_column=",
    )


def test_a_missing_text_column(refused, write_lines):
    path = write_lines({"body": "x"}, {"body": "y"})
    assert refused("data=text", f"data.path={path}") == no_column(path, 1)


@pytest.mark.usefixtures("without_weights")
def test_a_text_column_missing_further_on(failed, write_lines):
    path = write_lines(*({"text" if number < 30 else "body": f"{number} words"} for number in range(40)))
    assert failed("data=text", f"data.path={path}") == no_column(path, 31)


def converse(number, *roles):
    return {"messages": [{"role": role, "content": f"{number} words of the {role}"} for role in roles]}


@pytest.mark.usefixtures("without_weights")
@pytest.mark.parametrize(
    ("roles", "max_length"),
    [pytest.param(["user"], 50, id="nobody answers"), pytest.param(["user", "assistant"], 8, id="answers are cut off")],
)
def test_every_label_masked(failed, write_lines, text, roles, max_length):
    path = write_lines(*(converse(number, *roles) for number in range(20)))
    words = ["data.labels=completion", "data.packing=single", f"data.max_length={max_length}"]
    names = ", ".join(f"{path}:{number}" for number in range(1, 6))
    fault = f"skipped 20 sequences (no token counts in the loss: {names} and 15 more)"
    assert failed("data=text", f"data.path={path}", f"data.heldout_path={text}", *words) == message(
        f"the calibration text has no usable sequence: {fault}",
        f"{path}, data.labels=completion, data.max_length={max_length}",
        "data.labels=full_sequence, or larger data.max_length and data.tokens if answers begin after the cut",
    )
