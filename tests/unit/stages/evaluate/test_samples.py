import json

import pytest
import torch
from pico import write_pico
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.evaluate.samples import write_samples
from stages.text.config import DataConfig, SourceConfig

LONG = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = write_pico(tmp_path_factory.mktemp("pico"), "llama", layers=1, tokenizer=True)
    dense, carved = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    carved.lm_head.weight.data.mul_(-1)
    return {"dense": dense, "carved": carved}, AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def data(tmp_path):
    sources = []
    for name in ("birds", "stones"):
        lines = [json.dumps({"text": f"{name} {number} {LONG}"}) for number in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        sources.append(SourceConfig(share=0.5, path=str(tmp_path / f"{name}.jsonl")))
    return DataConfig(kind="mixture", sources=sources, max_length=16, heldout_share=0.99)


def test_documents_of_all_sources_are_continued_in_turn_by_both_models(models, data):
    samples = write_samples(*models, data, 3)
    prompts = [sample.prompt for sample in samples]
    assert [[name in prompt for name in ("birds", "stones")] for prompt in prompts] == [[1, 0], [0, 1], [1, 0]]
    tokenizer = models[1]
    assert all(len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) <= 8 for prompt in prompts)
    assert all(sample.dense != sample.carved for sample in samples)
    assert write_samples(*models, data, 3) == samples


def test_greedy_choices_are_the_models_own(models, data):
    (both, tokenizer), (sample, *_others) = models, write_samples(*models, data, 1)
    ids = tokenizer(sample.prompt, return_tensors="pt")["input_ids"]
    for name, model in both.items():
        with torch.no_grad():
            first = model(ids).logits[0, -1].argmax()
        assert getattr(sample, name).startswith(tokenizer.decode(first))


def test_nothing_is_written_on_request_or_where_weights_are_read_for_every_token(models, data):
    assert write_samples(*models, data, 0) == []
    offloaded = torch.nn.Linear(1, 1, device="meta")
    assert write_samples({**models[0], "offloaded": offloaded}, models[1], data, 3) == []


def test_a_damaged_record_behind_prompts_that_are_too_long_costs_no_evaluation(models, tmp_path):
    asked = [{"role": "user", "content": 9 * LONG}, {"role": "assistant", "content": "x"}]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"messages": asked}), "{"]))
    data = DataConfig(kind="text", heldout_path=str(tmp_path / "chats.jsonl"), max_length=16, chat_template="plain")
    assert write_samples(*models, data, 3) == []
