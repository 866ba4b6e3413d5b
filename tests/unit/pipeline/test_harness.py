"""The table that compares checkpoints, and messages about a missing checkpoint or harness."""

import json
import math
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pico import write_pico
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from unit.pipeline.served_carves import make_hostile, write_carve

from models.source import EMBEDDED
from pipeline.harness import TASK, TASKS, main, mean_and_error, show_answers


def answers(right, by_length):
    names = [("value-1", "value"), ("text-1", "text"), ("text-2", "text")]
    return [
        {"doc": {"id": name, "kind": kind}, "acc": acc, "acc_norm": norm}
        for (name, kind), acc, norm in zip(names, right, by_length, strict=True)
    ]


DENSE, CARVED = answers([1.0, 0.0, 1.0], [1.0, 1.0, 1.0]), answers([0.0, 0.0, 1.0], [1.0, 0.0, 0.0])
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


def test_what_the_command_cannot_do_is_said_before_anything_loads(given, tmp_path, capsys, monkeypatch):
    write_pico(tmp_path / "dense", "qwen2", tokenizer=True)
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "none"), str(tmp_path / "empty")]) == 2
    assert f"  where: {tmp_path / 'none'}, {tmp_path / 'empty'}\n" in capsys.readouterr().err
    assert main([str(tmp_path / "dense"), "--device", "gpu", "--limit", "3"]) == 2
    assert "unknown device 'gpu'\n  where: --device gpu" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main([str(tmp_path / "dense")]) == 2
    assert "pip install -e '.[harness]'" in capsys.readouterr().err
    assert given == []


@pytest.fixture
def given(monkeypatch):
    """A stand-in for lm-evaluation-harness; returns what it was given: models, tokenizers, batch sizes."""
    models = []

    def evaluate(model, limit, **_):
        models.append((model.pretrained, model.tokenizer, model.batch_size))
        docs = [{"id": f"{number}", "kind": "one"} for number in range(limit)]
        return {"samples": {TASK: [{"doc": doc, "acc": 1.0, "acc_norm": 0.0} for doc in docs]}}

    parts = {
        "lm_eval": SimpleNamespace(simple_evaluate=evaluate),
        "lm_eval.models": SimpleNamespace(),
        "lm_eval.models.huggingface": SimpleNamespace(HFLM=SimpleNamespace),
        "lm_eval.tasks": SimpleNamespace(TaskManager=lambda **_: None),
    }
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
    return models


def test_the_harness_can_load_the_projects_own_class():
    """In a process where nothing else has registered the class."""
    script = (
        "import sys, types\n"
        "class Asked(Exception): pass\n"
        "def model(**_):\n"
        "    from transformers import CONFIG_MAPPING\n"
        "    raise Asked('tiny_onn' in CONFIG_MAPPING)\n"
        "part = types.SimpleNamespace(HFLM=model, simple_evaluate=None, TaskManager=None)\n"
        "names = 'lm_eval', 'lm_eval.models', 'lm_eval.models.huggingface', 'lm_eval.tasks'\n"
        "sys.modules |= dict.fromkeys(names, part)\n"
        "from models.source import EMBEDDED\n"
        "from pipeline.harness import answer_choices\n"
        "try: answer_choices(EMBEDDED, device='cpu', dtype='float32', batch_size=1)\n"
        "except Asked as asked: print(asked)\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "True"


def test_the_checkpoint_is_loaded_as_asked(given, tmp_path, capsys):
    dense = write_pico(tmp_path / "dense", "qwen2", tokenizer=True)
    assert main([str(dense), "--dtype", "bfloat16", "--batch-size", "5", "--limit", "3"]) == 0
    ((model, tokenizer, batch_size),) = given
    assert (model.dtype, Path(tokenizer.name_or_path).name, batch_size) == (torch.bfloat16, dense.name, 5)
    assert "3 items" in capsys.readouterr().out


def test_no_python_of_a_checkpoint_is_run(given, tmp_path):
    for name, dense in (("moe", write_carve(tmp_path, "qwen2_moe", "qwen2", 64)), ("model", tmp_path / "dense")):
        hostile = make_hostile(dense, tmp_path / f"hostile {name}", tmp_path / "the Python of the checkpoint was run")
        assert main([str(hostile), "--limit", "3"]) == 0
    assert not (tmp_path / "the Python of the checkpoint was run").exists()
    assert not any("auto_map" in model.config.to_dict() for model, _tokenizer, _size in given)


def break_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut_weights(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def remove_tokenizer(folder):
    for path in folder.glob("*token*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (break_weights, "config.json says a model of "),
        (cut_weights, "model.safetensors"),
        (remove_tokenizer, "no usable tokenizer: it finds no token in plain text"),
    ],
)
def test_a_damaged_checkpoint_gets_no_accuracy(given, tmp_path, capsys, damage, what):
    """The harness would draw missing weights at random."""
    dense = write_pico(tmp_path / "dense", "qwen2", tokenizer=True)
    damage(dense)
    assert main([str(dense), "--limit", "3"]) == 1
    assert what in capsys.readouterr().err
    assert given == []


ITEMS = [json.loads(line) for line in (TASKS / f"{TASK}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_share_has_the_error_of_its_mean():
    assert mean_and_error([1, 0, 0, 1, 1]) == pytest.approx((0.6, math.sqrt(0.6 * 0.4 / 4)))
    assert math.isnan(mean_and_error([1.0])[1])


def test_items_are_well_formed_and_every_place_is_right_equally_often():
    assert len({item["id"] for item in ITEMS}) == len(ITEMS) == 306
    assert len({(item["prompt"], item["choices"][item["answer"]]) for item in ITEMS}) == len(ITEMS)
    for item in ITEMS:
        assert item.keys() == {"id", "kind", "prompt", "choices", "answer"}
        assert item["id"].startswith(f"{item['kind']}-")
        assert item["prompt"].strip()
        assert len(set(item["choices"])) == 4
        assert all(choice.strip() for choice in item["choices"])
        if item["kind"] in {"sentence", "line"}:  # the order of words alone decides
            assert len({"".join(sorted(choice)) for choice in item["choices"]}) == 1
    places = Counter(item["answer"] for item in ITEMS)
    assert max(places.values()) - min(places.values()) <= 2


def test_the_question_alone_decides_in_a_group():
    """Four items share their answers, and each answer is right once: a preference for an answer gains nothing."""
    groups = defaultdict(list)
    for item in ITEMS:
        if item["id"][-1].isalpha():
            groups[item["id"][:-1]].append(item)
    assert len(groups) == 64
    for items in groups.values():
        assert sorted(item["answer"] for item in items) == [0, 1, 2, 3]
        assert len({tuple(item["choices"]) for item in items}) == 1
        assert len({item["prompt"] for item in items}) == 4


def test_prompts_end_where_tokens_do():
    """Otherwise the harness counts part of the prompt as answer, or finds no answer."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    for item in ITEMS:
        prompt = tokenizer(item["prompt"])["input_ids"]
        for choice in item["choices"]:
            assert tokenizer(item["prompt"] + choice)["input_ids"][: len(prompt)] == prompt


def test_lines_of_python_are_python():
    """The right answers compile inside a frame of code: a loop in a function, and an `except` after a `try`."""
    for item in ITEMS:
        if item["kind"] == "line":
            text = item["prompt"] + item["choices"][item["answer"]]
            if text.startswith("    "):
                attempt = "    try:\n        pass\n" if text.startswith("    except") else ""
                text = f"def frame(self):\n  while True:\n{attempt}{text}"
            compile(text, item["id"], "exec")
