"""Training without our helpers harms a carve no more than the dense model."""

import re
from pathlib import Path

import pytest
from integration.carving import TARGETS
from survival import excess, heldout_loss, load_fp32, read_batches, read_text_batches, survive
from transformers import AutoTokenizer, Trainer, TrainingArguments

README = Path(__file__).parents[2] / "README.md"
# Learning rate of AdamW → steps after which to look; the slow tests look later.
QUICK, LONG = {1e-5: (1,), 1e-4: (5,)}, {1e-5: (1, 100), 1e-4: (10, 100)}
LOOKS = [pytest.param(QUICK, id="quick"), pytest.param(LONG, id="long", marks=pytest.mark.slow)]
ALLOWED, KEPT = 0.005, 0.97


def assert_survives(moe, dense, batches, heldout, looks):
    """Train MoE and dense model alike, from checkpoints."""
    for rate, steps in looks.items():
        both = [survive(load_fp32(folder), batches, heldout, rate=rate, looks=steps) for folder in (moe, dense)]
        assert all(excess(*both, look) <= ALLOWED for look in steps), (rate, both)
        if 1 in steps:
            assert both[0][1].kept >= KEPT


@pytest.mark.parametrize("looks", LOOKS)
@pytest.mark.parametrize("name", TARGETS)
def test_steps_of_a_plain_loop(carves, text, name, looks):
    carve = carves[name]
    batches = read_text_batches(carve.dense, text, 14)
    assert_survives(carve.checkpoints["project"], carve.dense, batches[:10], batches[10:], looks)


@pytest.mark.parametrize(
    ("name", "looks", "counts"),
    [
        ("embedded", QUICK, (5, 3)),
        *(pytest.param(name, LONG, (30, 30), marks=pytest.mark.slow) for name in ("embedded", "embedded-softmax")),
    ],
)
def test_steps_on_the_model_of_the_repository(carves, name, looks, counts):
    carve = carves[name]
    batches, heldout = map(read_batches, [carve.dense] * 2, ("calibration", "heldout"), counts)
    assert_survives(carve.checkpoints["project"], carve.dense, batches, heldout, looks)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("mixtral", "trainer"),
        ("glm4_moe", "trl"),
        *(
            pytest.param(name, way, marks=pytest.mark.slow)
            for name in ("embedded", "embedded-softmax")
            for way in ("trainer", "trl")
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # of TRL's own
def test_twenty_steps_of_any_script(carves, text, tmp_path, name, way):
    """Trainer and TRL with their own defaults: the held-out loss rises no more than the dense model's."""
    carve = carves[name]
    if name in TARGETS:
        batches = read_text_batches(carve.dense, text, 24)
        batches, heldout = batches[:20], batches[20:]
    else:
        batches, heldout = (read_batches(carve.dense, s, n) for s, n in (("calibration", 20), ("heldout", 6)))
    rises = []
    for folder in (carve.checkpoints["project"], carve.dense):
        model = load_fp32(folder)
        before = heldout_loss(model, heldout)
        WAYS[way](model, batches, tmp_path)
        rises.append(heldout_loss(model.eval(), heldout) - before)
    moe, dense = rises
    assert moe <= max(0.0, dense) + ALLOWED


def train_with_trainer(model, batches, output):
    rows = [{"input_ids": ids, "labels": ids} for batch in batches for ids in batch]
    arguments = TrainingArguments(
        str(output), max_steps=20, per_device_train_batch_size=4, report_to=[], save_strategy="no", use_cpu=True
    )
    Trainer(model, arguments, train_dataset=rows).train()


def train_with_trl(model, batches, output):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"input_ids": [ids.tolist() for batch in batches for ids in batch]})
    settings = trl.SFTConfig(
        str(output), max_steps=20, per_device_train_batch_size=4, report_to=[], save_strategy="no", use_cpu=True,
        bf16=True,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    trl.SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer).train()


WAYS = {"trainer": train_with_trainer, "trl": train_with_trl}


def test_the_snippet_of_the_readme(carves):
    """Its training step, run 20 times, harms the carve no more than the dense model."""
    snippet = re.search(r"## Use the checkpoint\n.*?```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    assert "AdamW(model.parameters(), lr=1e-5)" in snippet
    loading, training = snippet.split("model(**batch")
    carve, rises = carves["embedded"], []
    heldout = read_batches(carve.dense, "heldout", 6)
    for folder in (carve.checkpoints["project"], carve.dense):
        given = {}
        exec(loading.replace("outputs/latest/checkpoint", str(folder)), given)
        before = heldout_loss(given["model"], heldout)
        for _ in range(20):
            exec(f"optimizer.zero_grad()\nmodel(**batch{training}", given)
        rises.append(heldout_loss(given["model"], heldout) - before)
    moe, dense = rises
    assert moe <= max(0.0, dense) + ALLOWED
