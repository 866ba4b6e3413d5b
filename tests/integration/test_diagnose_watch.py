"""stage=diagnose on the embedded model: gradients in every precision."""

import json
import math

import pytest

from instruments.training_watch.step_log import read_step_log
from pipeline.cli import run_command
from stages.diagnose import stage

TEXT = " ".join(f"{number} larks met {number * 7 % 31} swifts near house {number % 9}." for number in range(400))


@pytest.fixture
def diagnose(tmp_path):
    documents = [TEXT[start : start + 300] for start in range(0, len(TEXT), 300)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents[::2]))
    (tmp_path / "heldout.txt").write_text("\n\n".join(documents[1::2]))

    def run(*words):
        text = [
            *("data=text", f"data.path={tmp_path / 'text.txt'}", f"data.heldout_path={tmp_path / 'heldout.txt'}"),
            *("data.tokens=400", "data.heldout_tokens=100", "data.max_length=60"),
        ]
        code = run_command([*text, "stage=diagnose", f"output_dir={tmp_path / 'out'}", *words])
        if code:
            return code
        folders = (tmp_path / "out/artifacts/embedded/diagnose").glob("[!.]*")
        return max(folders, key=lambda folder: folder.stat().st_mtime)

    return run


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_the_embedded_model_is_healthy_in_every_precision(diagnose, precision):
    folder = diagnose("check=watch", f"diagnose.watch.precision={precision}", "diagnose.watch.steps=3")
    lines = read_step_log(folder / "watch.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["anomalies"] for line in lines] == [[], [], []]
    assert ("loss_scale" in lines[0]) == (precision == "float16")
    assert len(lines[0]["layers"]) > 30
    assert (folder / "watch.png").read_bytes().startswith(b"\x89PNG")
    table = json.loads((folder / "manifest.json").read_text())["table"]
    assert table["title"] == f"3 passes in {precision}: ok"


def test_gradients_that_are_not_finite_in_one_pass_do_not_reach_the_next(diagnose, monkeypatch):
    load, factors = stage.load_model, iter([math.inf, 1.0, 1.0])

    def plant(*given):
        model = load(*given)
        weight = model.get_decoder().layers[1].mlp.up_proj.weight.requires_grad_(True)
        weight.register_hook(lambda gradient: gradient * next(factors))
        return model

    monkeypatch.setattr(stage, "load_model", plant)
    folder = diagnose("check=watch", "diagnose.watch.precision=float32", "diagnose.watch.steps=3")
    found = [[one["kind"] for one in line["anomalies"]] for line in read_step_log(folder / "watch.jsonl")]
    assert found == [["not_finite"], [], []]
