"""The table that compares checkpoints, and messages about a missing checkpoint or harness."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.harness import main, show_answers
from stages.evaluate.harness import Answers

KINDS = {"value-1": "value", "text-1": "text", "text-2": "text"}
DENSE = Answers({"value-1": 1.0, "text-1": 0.0, "text-2": 1.0}, {"value-1": 1.0, "text-1": 1.0, "text-2": 1.0}, KINDS)
CARVED = Answers({"value-1": 0.0, "text-1": 0.0, "text-2": 1.0}, {"value-1": 1.0, "text-1": 0.0, "text-2": 0.0}, KINDS)
TABLE = """\
checkpoint    accuracy, %    by length, %    above the first, points
------------  -------------  --------------  -------------------------
dense         66.7 ± 33.3    100.0 ± 0.0
carved        33.3 ± 33.3    33.3 ± 33.3     -33.3 ± 33.3

accuracy, %    value (1)    text (2)
-------------  -----------  ----------
dense          100.0        50.0
carved         0.0          50.0

3 items; ± is one standard error, that of a difference taken item by item
"""


def test_the_table():
    assert show_answers({"dense": DENSE, "carved": CARVED}) == TABLE


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--limit", "0"], "argument --limit: 0 is not at least 1"),
        (["--batch-size", "-2"], "argument --batch-size: -2 is not at least 1"),
        (["--dtype", "float33"], "argument --dtype: invalid choice: 'float33'"),
    ],
)
def test_wrong_numbers_and_formats_are_refused_before_anything_loads(words, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_folders_without_a_checkpoint_are_all_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "none"), str(tmp_path / "empty")]) == 2
    assert capsys.readouterr().err == (
        "no config.json, so no checkpoint\n"
        f"  where: {tmp_path / 'none'}, {tmp_path / 'empty'}\n"
        "  do:    python -m pipeline, which leaves one in outputs/latest/checkpoint\n"
    )


def test_a_missing_harness_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    (tmp_path / "config.json").write_text("{}")
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "lm-evaluation-harness is not installed (lm_eval is missing)\n"
        "  where: python -m pipeline.harness\n"
        "  do:    pip install -e '.[harness]'\n"
    )


def test_the_harness_can_load_the_projects_own_class():
    """A stand-in for lm-evaluation-harness, in a process where nothing else has registered the class."""
    script = (
        "import sys, types, pathlib\n"
        "class Asked(Exception): pass\n"
        "def simple_evaluate(**_):\n"
        "    from transformers import CONFIG_MAPPING\n"
        "    raise Asked('tiny_onn' in CONFIG_MAPPING)\n"
        "tasks = types.SimpleNamespace(TaskManager=lambda **_: None)\n"
        "sys.modules |= {'lm_eval': types.SimpleNamespace(simple_evaluate=simple_evaluate), 'lm_eval.tasks': tasks}\n"
        "from stages.evaluate.harness import answer_choices\n"
        "try: answer_choices(pathlib.Path('.'), device='cpu', dtype='float32', batch_size=1)\n"
        "except Asked as asked: print(asked)\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "True"
