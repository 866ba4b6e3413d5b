"""Generation with models in 4 and 8 bits, in half precision, and with layers in memory and on disk."""

import pytest
from numerics.quantised_models import plain_twin
from pico import write_pico
from transformers import AutoModelForCausalLM

from models.config import ModelConfig
from models.loading import is_offloaded, load_dense
from stages.text.config import DataConfig
from stages.text.generated import write_continuations

PROMPTS = [[9, 8, 7, 6, 5], [12], [3, 4, 5]]
WRITING = DataConfig(max_new_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pico(tmp_path_factory.mktemp("qwen3"), "qwen3", hidden=40, intermediate=72, layers=3)


def load(folder, **settings):
    return load_dense(ModelConfig(kind="local", path=str(folder), device="cpu", **settings), folder)


@pytest.mark.parametrize("quantization", ["nf4", "fp4"])
def test_a_4_bit_model_writes_what_its_plain_twin_writes(folder, quantization):
    model = load(folder, quantization=quantization)
    expected = write_continuations(plain_twin(model, folder), PROMPTS, WRITING, (), 0, seed=0)
    assert write_continuations(model, PROMPTS, WRITING, (), 0, seed=0) == expected


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"dtype": "bfloat16"}, {"dtype": "float16"}])
def test_other_formats_write_to_the_end(folder, settings):
    written = write_continuations(load(folder, **settings), PROMPTS, WRITING, (), 0, seed=0)
    assert [len(tokens) for tokens in written] == [6, 6, 6]


def test_an_offloaded_model_writes_the_same(folder):
    expected = write_continuations(AutoModelForCausalLM.from_pretrained(folder).eval(), PROMPTS, WRITING, (), 0, seed=0)
    offloaded = load(folder, device_map="auto", cpu_memory="60KB")
    assert is_offloaded(offloaded)
    assert write_continuations(offloaded, PROMPTS, WRITING, (), 0, seed=0) == expected
