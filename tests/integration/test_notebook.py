"""The notebook of examples/ runs from an empty folder, cell by cell."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples/first_carve.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            capsys.readouterr()
            exec(compile("".join(cell["source"]), cell["id"], "exec"), given)
            assert capsys.readouterr().out.strip(), cell["id"]  # every cell shows something
    assert given["result"].figures["this MoE"]["loss gap (nats)"] < 0.2
    assert (tmp_path / "outputs/latest/report.html").exists()


def test_the_notebook_is_without_outputs():
    """They would change with every run."""
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
