import json

import pytest

from instruments.errors import DataError
from stages.text.config import DataConfig
from stages.text.sources import read_text


def read(split="calibration", **settings):
    return list(read_text(DataConfig(kind="text", **settings), split))


def message_of(**settings):
    with pytest.raises(DataError) as caught:
        read(**settings)
    return str(caught.value)


def test_a_path_below_a_folder_that_may_not_be_entered(closed):
    assert message_of(path=str(closed / "x")).startswith(f"cannot read {closed / 'x'}: Permission denied")


def test_a_jsonl_record_is_a_document_named_by_file_and_line(write_jsonl):
    path = write_jsonl("a.jsonl", [{"text": "one"}, {"text": ""}, {"messages": [{"role": "user", "content": "two"}]}])
    first, second = read(path=str(path), heldout_path=str(write_jsonl("b.jsonl", [])))
    assert (first.name, first.text) == (f"{path}:1", "one")
    assert (second.name, second.messages) == (f"{path}:3", ({"role": "user", "content": "two"},))


def test_a_txt_file_is_cut_into_passages_named_by_their_first_lines(tmp_path):
    path = tmp_path / "a.txt"
    paragraph = "lobster " * 300 + "\n\n"
    path.write_bytes(("\ufeff" + paragraph * 3).replace("\n", "\r\n").encode())
    documents = read(path=str(path), heldout_path=str(path))
    assert documents == []
    documents = read("heldout", path=str(path), heldout_path=str(path))
    assert [document.name for document in documents] == [f"{path}:1", f"{path}:3", f"{path}:5"]
    assert [document.text for document in documents] == [paragraph.strip()] * 3


def test_the_passages_of_a_running_text_hold_all_of_it(tmp_path):
    path = tmp_path / "a.txt"
    text = "\n\n".join("word " * (37 * number % 400) + str(number) for number in range(100))
    path.write_text(text, encoding="utf-8")
    assert "\n\n".join(document.text for document in read("heldout", heldout_path=str(path))) == text


def test_a_share_of_one_path_is_held_out(write_jsonl):
    path = str(write_jsonl("a.jsonl", [{"text": f"text {number}"} for number in range(300)]))
    heldout, calibration = read("heldout", path=path), read("calibration", path=path)
    assert len(heldout) + len(calibration) == 300
    assert {document.text for document in heldout}.isdisjoint(document.text for document in calibration)
    assert 10 < len(heldout) < 60


def test_calibration_leaves_out_what_the_heldout_file_in_its_folder_holds(tmp_path, write_jsonl):
    write_jsonl("a.jsonl", [{"text": "one"}, {"text": "two"}])
    heldout = write_jsonl("heldout.jsonl", [{"text": "two"}, {"text": "three"}])
    assert [document.text for document in read(path=str(tmp_path), heldout_path=str(heldout))] == ["one"]
    heldout_texts = [document.text for document in read("heldout", path=str(tmp_path), heldout_path=str(heldout))]
    assert heldout_texts == ["two", "three"]


def test_the_files_of_a_folder_take_turns(tmp_path, write_jsonl):
    (tmp_path / "deeper").mkdir()
    write_jsonl("deeper/b.JSONL", [{"text": f"b{number}"} for number in range(2)])
    write_jsonl("a.jsonl", [{"text": f"a{number}"} for number in range(3)])
    (tmp_path / "c.txt").write_text("c0", encoding="utf-8")
    (tmp_path / "d.csv").write_text("d0", encoding="utf-8")
    texts = [document.text for document in read("heldout", heldout_path=str(tmp_path))]
    assert texts == ["a0", "c0", "b0", "a1", "b1", "a2"]


def test_more_files_than_may_be_open_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("stages.text.sources.FILES_AT_ONCE", 3)
    for number in range(7):
        (tmp_path / f"{number}.txt").write_text(f"text {number}", encoding="utf-8")
    texts = [document.text for document in read("heldout", heldout_path=str(tmp_path))]
    assert texts == [f"text {number}" for number in range(7)]


def test_a_path_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message_of(path="a.jsonl").startswith("no file and no folder a.jsonl")


@pytest.mark.parametrize("name", ["a.parquet", "README"])
def test_a_suffix_that_is_not_read(tmp_path, name):
    (tmp_path / name).touch()
    assert f"where: data.path={tmp_path}/{name}" in message_of(path=str(tmp_path / name))


def test_a_folder_without_text(tmp_path):
    (tmp_path / "a.csv").touch()
    assert message_of(path=str(tmp_path)).startswith("the folder holds no .jsonl and no .txt file")


def test_a_line_that_is_no_json(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one"}) + '\n\n{"text": oops}\n', encoding="utf-8")
    assert message_of(path=str(path)).startswith(f"not a JSON record: Expecting value\n  where: {path}:3, character 10")


def test_bytes_that_are_no_utf8(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ncaf\xe9\n")
    assert message_of(path=str(path)).startswith(f"not UTF-8: byte 4 of the line is 0xe9\n  where: {path}:2")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_named(tmp_path, encoding):
    """As PowerShell and Notepad write it; read as latin1, as advised for other bytes, it would be full of zeros."""
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffcafé\n".encode(encoding))
    assert message_of(path=str(path)).endswith("  do:    convert the file to UTF-8, e.g. iconv -f utf-16 -t utf-8")
    path.write_bytes("one\n\ntwo rooks\n".encode(encoding))  # without its mark
    assert message_of(path=str(path)).startswith("no text in UTF-8: ")


def test_a_file_that_cannot_be_opened(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.touch()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    assert message_of(path=str(path)).startswith(f"cannot read the file: Permission denied\n  where: {path}")
