"""Unreadable text, and text without tokens to learn from: refused before weights are loaded."""

import json
import re

import pytest


@pytest.fixture
def write_lines(tmp_path):
    """Write a .jsonl file."""

    def write(*records):
        path = tmp_path / "records.jsonl"
        path.write_text("\n".join(json.dumps(record) for record in records))
        return path

    return write


def places(error):
    return re.findall("^  where: (.*)$", error, re.M)


@pytest.mark.parametrize(
    ("content", "splits"), [("\n \n\n", ("calibration", "heldout")), ("one paragraph", ("heldout",))]
)
def test_text_too_short_for_two_splits(refused, tmp_path, content, splits):
    path = tmp_path / "short.txt"
    path.write_text(content)
    found = places(refused("data=text", f"data.path={path}"))
    assert found == [f"{split} text of {path}, data.heldout_share=0.1" for split in splits]


def test_a_missing_text_column(refused, write_lines):
    path = write_lines({"body": "x"}, {"body": "y"})
    assert places(refused("data=text", f"data.path={path}")) == [f"{path}:1; its columns: body"]


@pytest.mark.usefixtures("without_weights")
def test_a_text_column_missing_further_on(failed, write_lines):
    path = write_lines(*({"text" if number < 30 else "body": f"{number} words"} for number in range(40)))
    assert places(failed("data=text", f"data.path={path}")) == [f"{path}:31; its columns: body"]


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
    error = failed("data=text", f"data.path={path}", f"data.heldout_path={text}", *words)
    assert places(error) == [f"{path}, data.labels=completion, data.max_length={max_length}"]
    assert "  do:    data.labels=full_sequence" in error
