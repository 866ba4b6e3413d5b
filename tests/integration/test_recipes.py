"""The recipes of stages/train/RECIPES.md, run unchanged."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from integration.carving import words_of_pico
from pico import write_pico
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from pipeline.cli import run_command

RECIPES = Path(__file__).parents[2] / "stages/train/RECIPES.md"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, text):
    """A carve made for training."""
    folder = tmp_path_factory.mktemp("recipes")
    words = [
        *words_of_pico(write_pico(folder / "pico", "qwen3", tokenizer=True, tie=True), text),
        *("cluster.map=none", f"output_dir={folder}", "stage=assemble", "cluster=rank"),
        *("experts=4", "n=8", "top_k=2", "always_on=8"),
    ]
    assert run_command(words) == 0
    return str((folder / "latest/checkpoint").resolve())


def recipe(title, language="python"):
    section = RECIPES.read_text().split(f"## {title}\n")[1]
    return re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)[1]


def cook(title, checkpoint, output):
    torch.manual_seed(0)
    texts = [f"{number} finches met {number % 5} wrens near the house." for number in range(8)]
    given = {"checkpoint": checkpoint, "texts": texts, "output": str(output)}
    exec(compile(recipe(title), title, "exec"), given)
    return given


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def assert_trained(folder, checkpoint):
    before, after = weights(checkpoint), weights(folder)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    expected = {name for name, tensor in before.items() if ".mlp." in name and "correction_bias" not in name}
    assert changed == expected


def test_a_loop_and_the_files_that_other_programs_read(checkpoint, tmp_path):
    cook("A loop in PyTorch", checkpoint, tmp_path)
    assert_trained(tmp_path, checkpoint)
    carved = json.loads(Path(checkpoint, "config.json").read_text())
    # transformers 4.57 reads it there.
    assert "rope_theta" not in json.loads((tmp_path / "config.json").read_text())
    before = weights(tmp_path)
    command = recipe("Before other programs read it", "bash")
    latest = tmp_path / "latest"  # as outputs/latest/checkpoint
    latest.symlink_to(checkpoint)
    subprocess.run(["bash", "-c", command], check=True, env={"checkpoint": str(latest), "output": str(tmp_path)})
    files = {path.name for path in Path(checkpoint).iterdir() if ".safetensors" not in path.name} - {"README.md"}
    assert files > {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    for name in files:
        assert (tmp_path / name).read_bytes() == Path(checkpoint, name).read_bytes(), name
    assert carved["rope_theta"] == 10_000.0
    after = weights(tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)
    wanted = AutoTokenizer.from_pretrained(checkpoint)("def carve():")["input_ids"]
    assert AutoTokenizer.from_pretrained(tmp_path)("def carve():")["input_ids"] == wanted


def test_routers_that_learn_what_they_did_not_choose(checkpoint, tmp_path):
    cook("Routers that learn what they did not choose", checkpoint, tmp_path)
    before, after = weights(checkpoint), weights(tmp_path)
    assert any(not torch.equal(before[name], after[name]) for name in before if name.endswith(".gate.weight"))


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning")
def test_trainer_and_how_it_goes_on(checkpoint, tmp_path):
    cook("Trainer", checkpoint, tmp_path / "whole")
    assert_trained(tmp_path / "whole/checkpoint-6", checkpoint)
    shutil.copytree(tmp_path / "whole/checkpoint-3", tmp_path / "again/checkpoint-3")
    cook("Trainer", checkpoint, tmp_path / "again")
    whole, again = (weights(tmp_path / name / "checkpoint-6") for name in ("whole", "again"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # of TRL's own
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning")
def test_trl(checkpoint, tmp_path):
    pytest.importorskip("trl")
    cook("TRL", checkpoint, tmp_path)
    assert_trained(tmp_path, checkpoint)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of PEFT's own
def test_peft(checkpoint, tmp_path):
    pytest.importorskip("peft", reason="needs pip install peft")
    cook("PEFT", checkpoint, tmp_path)
    before, after = weights(checkpoint), weights(tmp_path)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    adapted = (".q_proj.", ".v_proj.", ".experts.gate_up_proj", ".experts.down_proj")
    assert changed == {name for name in before if any(part in name for part in adapted) and "shared" not in name}
    assert not list(tmp_path.glob("adapter*"))


def test_trainer_does_not_load_the_experts_of_its_best_checkpoint_and_from_pretrained_does(checkpoint, tmp_path):
    """If this fails because transformers loads them, the warning in the recipe is out of date."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.5)
    trainer.state.best_model_checkpoint, trainer.state.best_metric = checkpoint, 1.0
    trainer._load_best_model()
    wrong = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert wrong == {name for name in before if ".mlp.experts." in name}
    loaded = weights(checkpoint)
    assert all(torch.equal(loaded[name], weight) for name, weight in before.items())
