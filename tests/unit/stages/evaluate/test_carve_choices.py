"""The multiple-choice items of `stages/evaluate/tasks`, and lm-evaluation-harness with them."""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from models.source import EMBEDDED

TASKS, TASK = Path(__file__).parents[4] / "stages/evaluate/tasks", "carve_choices"
ITEMS = [json.loads(line) for line in (TASKS / f"{TASK}.jsonl").read_text(encoding="utf-8").splitlines()]


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


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="pip install -e '.[harness]'")
def test_the_harness_runs_the_items_from_any_folder_without_a_network(tmp_path):
    words = ["--model", "hf", "--model_args", f"pretrained={EMBEDDED},dtype=float32", "--device", "cpu"]
    words += ["--include_path", str(TASKS), "--tasks", TASK, "--limit", "24", "--output_path", str(tmp_path / "found")]
    command, environment = [sys.executable, "-m", "lm_eval", *words], os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    (found,) = (tmp_path / "found").rglob("results_*.json")
    record = json.loads(found.read_text())
    assert record["n-samples"][TASK] == {"original": 306, "effective": 24}
    assert record["results"][TASK].keys() >= {"acc,none", "acc_stderr,none", "acc_norm,none", "acc_norm_stderr,none"}
