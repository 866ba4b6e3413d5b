"""One stage at a time: the settings that it needs, and its closing lines."""

import shlex

import pytest
from integration.carving import similar_lines, words_of_pico
from pico import write_pico

from instruments.errors import UserError
from pipeline.cli import run_command


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    write_pico(folder / "pico", "qwen3", tokenizer=True)
    (folder / "one.jsonl").write_text(f'{{"text": "{" ".join(similar_lines(310))}"}}\n')
    return folder


def next_words(capsys):
    """The commands at the end of a run, as words after `python -m pipeline`."""
    lines = capsys.readouterr().out.rpartition("\nnext ")[2].splitlines()
    return [shlex.split(line)[3:] for line in lines]


def test_a_scan_of_one_document_needs_no_held_out_text_and_says_how_to_go_on(source, tmp_path, capsys):
    words = [
        *words_of_pico(source / "pico", source / "one.jsonl"),
        f"output_dir={tmp_path}",
        "scan.reservoir_tokens=50",
    ]
    assert run_command([*words, "stage=scan", "fresh=true"]) == 0
    assert next_words(capsys) == [[*words, f"stage={stage}"] for stage in ("score", "project")]
    (run,) = (tmp_path / "runs").iterdir()
    assert "What scan found" in (run / "report.html").read_text()
    assert run_command([*words, "stage=score"]) == 0
    assert next_words(capsys) == [[*words, "stage=cluster"]]


def fail(*_args, **_settings):
    raise UserError("no score")


def test_a_run_that_fails_leaves_the_page_of_what_it_finished(source, text, tmp_path, capsys, monkeypatch):
    words = [*words_of_pico(source / "pico", text), f"output_dir={tmp_path}"]
    assert run_command([*words, "stage=scan"]) == 0
    monkeypatch.setattr("stages.score.stage.run", fail)
    assert run_command([*words, "stage=score"]) == 1
    assert capsys.readouterr().err.endswith("no score\n")
    pages = [path.read_text() for path in tmp_path.glob("runs/*/report.html")]
    assert len(pages) == 2
    assert all("What scan found" in page for page in pages)
