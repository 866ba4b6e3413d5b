import csv
import gzip
import json
import os
from functools import partial

import pyarrow.parquet
import pytest

from instruments.errors import DataError
from stages.text.config import DataConfig, Source, list_sources
from stages.text.files import MAX_LINE, describe_files, list_files, read_file
from stages.text.sources import read_sources


def read(role="calibration", **settings):
    ((_, documents),) = read_sources(DataConfig(**{"kind": "text", "path": "none"} | settings), role)
    return list(documents)


def texts(path):
    return [document.text for document in read("heldout", heldout_path=str(path))]


def refusal(path):
    with pytest.raises(DataError) as caught:
        read(path=str(path))
    return caught.value


def test_a_jsonl_record_is_a_document_named_by_file_and_line(write_jsonl):
    path = write_jsonl("a.jsonl", [{"text": "one"}, {"text": ""}, {"messages": [{"role": "user", "content": "two"}]}])
    first, second = read(path=str(path), heldout_share=1e-9)
    assert (first.name, first.text) == (f"{path}:1", "one")
    assert (second.name, second.messages) == (f"{path}:3", ({"role": "user", "content": "two"},))


def test_a_txt_file_is_cut_into_passages_named_by_their_first_lines(tmp_path):
    path = tmp_path / "a.txt"
    paragraph = "lobster " * 300 + "\n\n"
    path.write_bytes(("\ufeff" + paragraph * 3).replace("\n", "\r\n").encode())
    documents = read("heldout", heldout_path=str(path))
    assert [document.name for document in documents] == [f"{path}:1", f"{path}:3", f"{path}:5"]
    assert [document.text for document in documents] == [paragraph.strip()] * 3


def test_the_passages_of_a_running_text_hold_all_of_it(tmp_path):
    text = "\n\n".join("word " * (37 * number % 400) + str(number) for number in range(100))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert "\n\n".join(texts(tmp_path)) == text


@pytest.mark.parametrize("letter", ["a", "é", "龙", "🦞"])
@pytest.mark.parametrize("shift", range(4))
def test_long_lines_are_cut_between_characters(tmp_path, letter, shift):
    text = "b" * shift + letter * 50_000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert "".join(texts(tmp_path)) == text
    assert max(len(part.encode()) for part in texts(tmp_path)) <= MAX_LINE


def test_long_lines_are_cut_at_spaces_and_read_as_far_as_needed(tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 12_000 + "\nlast\n", encoding="utf-8")
    assert " ".join(texts(tmp_path)).split() == ["some", "words"] * 12_000 + ["last"]
    os.truncate(tmp_path / "a.txt", 2**33)  # a hole
    assert next(read_file(tmp_path / "a.txt", Source())).text.startswith("some words")


def test_a_share_of_one_path_is_held_out(write_jsonl):
    path = str(write_jsonl("a.jsonl", [{"text": f"text {number}"} for number in range(300)]))
    heldout, calibration = read("heldout", path=path), read("calibration", path=path)
    assert len(heldout) + len(calibration) == 300
    assert {document.text for document in heldout}.isdisjoint(document.text for document in calibration)
    assert 10 < len(heldout) < 60


def test_calibration_leaves_out_what_the_heldout_file_in_its_folder_holds(tmp_path, write_jsonl):
    chat = {"messages": [{"role": "user", "content": "b"}]}
    write_jsonl("a.jsonl", [{"text": "one"}, {"text": "two"}, chat])
    heldout = write_jsonl("heldout.jsonl", [{"text": "two"}, {"text": "three"}, chat])
    assert [document.text for document in read(path=str(tmp_path), heldout_path=str(heldout))] == ["one"]
    found = read("heldout", path=str(tmp_path), heldout_path=str(heldout))
    assert [document.text for document in found] == ["two", "three", ""]


def test_the_files_of_a_folder_take_turns(tmp_path, write_jsonl, monkeypatch):
    (tmp_path / "deeper").mkdir()
    write_jsonl("deeper/b.JSONL", [{"text": f"b{number}"} for number in range(2)])
    write_jsonl("a.jsonl", [{"text": f"a{number}"} for number in range(3)])
    (tmp_path / "c.txt").write_text("c0", encoding="utf-8")
    (tmp_path / "d.log").write_text("d0", encoding="utf-8")
    assert texts(tmp_path) == ["a0", "c0", "b0", "a1", "b1", "a2"]
    monkeypatch.setattr("stages.text.files.FILES_AT_ONCE", 2)
    assert texts(tmp_path) == ["a0", "b0", "a1", "b1", "a2", "c0"]  # a.jsonl with deeper/b.JSONL, then c.txt


ROWS = [{"text": "one, two"}, {"text": "three\nfour"}]


def write_rows(path):
    """The rows in the format of the file's name."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    match "".join(path.suffixes):
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        case ".jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case ".jsonl.zst":
            path.write_bytes(pyarrow.compress(lines, codec="zstd", asbytes=True))
        case ".json":
            path.write_text(json.dumps(ROWS))
        case ".csv":
            path.write_text('id,text\r\n1,"one, two"\r\n2,"three\nfour"\r\n')


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.csv"])
def test_every_format_gives_the_same_documents_or_says_that_it_is_damaged(tmp_path, name):
    write_rows(tmp_path / name)
    assert texts(tmp_path / name) == ["one, two", "three\nfour"]
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) * 2 // 3])
    assert str(tmp_path / name) in refusal(tmp_path / name).where


def test_a_file_that_is_not_compressed_as_its_name_says(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(b"plain")
    assert refusal(tmp_path / "a.txt.gz").where == str(tmp_path / "a.txt.gz")


def test_a_row_of_another_length_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n1,a,b\n")
    assert refusal(tmp_path / "a.csv").where == f"{tmp_path / 'a.csv'}, row 1"
    (tmp_path / "a.csv").write_text("text,text,,\na,b,c,d\n")
    assert refusal(tmp_path / "a.csv").what == "two columns have the name 'text'"


def test_a_record_that_is_too_long_is_named(tmp_path, monkeypatch, request):
    request.addfinalizer(partial(csv.field_size_limit, csv.field_size_limit()))  # it holds for the whole process
    monkeypatch.setattr("stages.text.files.MAX_RECORD", 100)
    monkeypatch.setattr("stages.text.files.MAX_JSON", 100)
    for name in ("a.jsonl", "a.json", "a.csv"):
        (tmp_path / name).write_text('{"text": "' + "a" * 200 + '"}\n' if name != "a.csv" else "text\n" + "a" * 200)
        assert str(tmp_path / name) in refusal(tmp_path / name).where


def test_other_files_that_hold_more_than_those_that_are_read_are_an_error(tmp_path):
    (tmp_path / "notes.md").write_text("some words")
    (tmp_path / "code.py").write_text("x = 1")
    assert describe_files(Source(path=str(tmp_path))) == " (1 .md, without code.py)"
    (tmp_path / "wiki_00").write_text("more words")
    assert "code.py; wiki_00" in refusal(tmp_path).what


def test_hidden_files_and_files_about_the_data_are_left_out(tmp_path, write_jsonl):
    write_jsonl("train.jsonl", [{"text": "one"}])
    for name in (".ipynb_checkpoints/train.jsonl", "__MACOSX/._train.jsonl", "README.md", "LICENSE.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\xff not text")
    assert texts(tmp_path) == ["one"]
    assert describe_files(Source(path=str(tmp_path))) == " (1 .jsonl, without LICENSE.txt, README.md)"
    write_jsonl("license-texts.jsonl", [{"text": "two"}])  # records are no file about the data
    assert sorted(texts(tmp_path)) == ["one", "two"]


def test_links_are_followed_and_every_file_is_read_once(tmp_path, write_jsonl):
    folder = tmp_path / "folder"
    write_jsonl("elsewhere/b.jsonl", [{"text": "b"}])
    file = write_jsonl("folder/a.jsonl", [{"text": "a"}])
    (folder / "c.jsonl").symlink_to(file)
    (folder / "deeper").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(folder)
    (folder / "lost+found").mkdir(mode=0)
    assert sorted(texts(folder)) == ["a", "b"]
    both = Source(paths=[str(folder), str(file), str(file)])
    assert [path.name for path in list_files(both)] == ["a.jsonl", "b.jsonl"]
    assert describe_files(both) == " (2 .jsonl)"
    (folder / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    assert "gone.jsonl" in refusal(folder).what


def test_a_closed_folder_among_others(closed):
    assert "Permission denied" in refusal(closed.parent).what


def test_a_readme_alone_is_text(tmp_path):
    (tmp_path / "README.md").write_text("words")
    assert texts(tmp_path) == ["words"]


@pytest.mark.parametrize("name", ["train.arrow", "deeper/part.tsv", "archive.tar.gz"])
def test_data_that_is_not_read_beside_text_is_an_error(tmp_path, write_jsonl, name):
    write_jsonl("train.jsonl", [{"text": "one"}])
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert name in refusal(tmp_path).what


def test_several_paths_are_read_one_after_another(write_jsonl):
    first, second = (str(write_jsonl(f"{name}.jsonl", [{"text": name}])) for name in "ab")
    found = read(path=None, paths=[second, first], heldout_share=1e-9)
    assert {document.text for document in found} == {"a", "b"}
    with pytest.raises(DataError) as caught:
        read(path=None, paths=[first, "nowhere"])
    assert caught.value.where.startswith("data.paths=nowhere")


@pytest.mark.parametrize("name", ["missing.jsonl", "a.tsv", "README", ""])
def test_a_path_without_text_names_its_setting(tmp_path, name):
    for unread in ("a.tsv", "README"):
        (tmp_path / unread).touch()
    assert refusal(tmp_path / name).where.startswith(f"data.path={tmp_path / name}")
    with pytest.raises(DataError) as caught:
        read("heldout", heldout_path=str(tmp_path / name))
    assert caught.value.do.startswith("data.heldout_path=")


def test_a_folder_that_may_not_be_entered(closed):
    assert "Permission denied" in refusal(closed / "x").what


def test_a_file_that_may_not_be_opened(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.touch()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    assert refusal(path).where == str(path)


@pytest.mark.parametrize("line", ["{oops}", "[" * 500_000, '{"text": "a", "number": ' + "9" * 5000 + "}", "\0" * 50])
def test_a_line_that_is_no_json_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one"}) + f"\n\n{line}\n", encoding="utf-8")
    assert refusal(path).where == f"{path}:3"


@pytest.mark.parametrize(
    "content", [b"one\ncaf\xe9\n", "one\ncaf\n".encode("utf-16"), "one\ntwo\n".encode("utf-16-le")], ids=str
)
def test_bytes_that_are_no_utf8(tmp_path, content):
    """The last is valid UTF-8 with many zeros."""
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert "not UTF-8" in refusal(path).what


def test_a_zero_alone_on_a_line_is_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\0\ntwo\n")
    assert texts(tmp_path) == ["one\n\0\ntwo"]


def test_labels_of_answers_need_conversations(write_jsonl):
    path = write_jsonl("a.jsonl", [{"text": "one"}])
    with pytest.raises(DataError) as caught:
        read(path=str(path), heldout_share=1e-9, labels="completion")
    assert (caught.value.where, "data.labels=full_sequence" in caught.value.do) == (f"{path}:1", True)
    assert len(read("heldout", heldout_path=str(path), labels="completion")) == 1


def test_heldout_text_of_a_file_beside_the_standard_library(write_jsonl):
    path = str(write_jsonl("a.jsonl", [{"text": "one"}]))
    assert [document.text for document in read("heldout", kind="python_stdlib", heldout_path=path)] == ["one"]
    assert list_sources(DataConfig(heldout_path=path), "calibration") == list_sources(DataConfig(), "calibration")
