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


@pytest.mark.parametrize("content", ["", "\n \n\n"])
def test_empty_text(refused, tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_text(content)
    assert refused("data=text", f"data.path={path}") == message(
        "the text is empty", f"data.path={path}", "data.path=text that holds something"
    )


def test_text_too_short_for_two_splits(refused, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("one paragraph")
    assert refused("data=text", f"data.path={path}") == message(
        "no document falls to the heldout text",
        f"heldout text of {path}, data.heldout_share=0.1 of its documents held out",
        "text with more documents, another data.heldout_share, or data.heldout_path= held-out text of its own",
    )


def test_a_missing_text_column(refused, write_lines):
    path = write_lines({"body": "x"}, {"body": "y"})
    assert refused("data=text", f"data.path={path}") == message(
        "a record has neither column 'messages' nor column 'text'",
        f"{path}:1; its columns: body",
        "name the column: data.text_column= or data.messages_column=",
    )


@pytest.mark.usefixtures("without_weights")
def test_a_text_column_missing_further_on(failed, write_lines):
    path = write_lines(*({"text" if number < 30 else "body": f"{number} words"} for number in range(40)))
    assert failed("data=text", f"data.path={path}") == message(
        "a record has neither column 'messages' nor column 'text'",
        f"{path}:31; its columns: body",
        "name the column: data.text_column= or data.messages_column=",
    )


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
    assert failed("data=text", f"data.path={path}", f"data.heldout_path={text}", *words) == message(
        "every label is masked: none of 20 sequences has a token that counts in the loss",
        f"calibration text of {path}, data.labels=completion, data.max_length={max_length}",
        f"data.labels=full_sequence, or data.max_length={2 * max_length} if the answers begin after the cut",
    )
