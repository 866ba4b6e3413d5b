"""The remedies for words of other programs."""

import shlex

import pytest

from pipeline.advice import SYNONYMS
from pipeline.check import InvalidSettingsError
from pipeline.cli import start
from pipeline.overrides import expand_words, flag_errors, override_errors

REMEDIES = {
    "model=qwen": "model=/FOLDER, model=OWNER/NAME or a preset such as model=qwen2_5_0_5b or qwen2_5_coder_0_5b",
    "path=/a/model": "model=/a/model",
    "model_name=Qwen/Qwen2.5-0.5B": "model=Qwen/Qwen2.5-0.5B",
    "dataset=wiki.txt": "data=wiki.txt",
    "device=cuda": "model.device=cuda",
    "train.lr=1e-4": "train.expert_rate=1e-4",
    "data.tokens=1M": "data.tokens=1000000",
    "data.tokens=1e6": "data.tokens=1000000",
    "data.tokens=100k": "data.tokens=100000",
    "active=50%": "active=0.5",
    "dense_layers=0": "dense_layers=[0]",
    "dense_layers=[a]": "dense_layers=[]",
    "stage=carve": "stage=all",
    "train": "stage=train",
    "plan": "plan=true",
    "dry-run=true": "plan=true",
    "density=0.25": "active=0.25",
    "ratio=25%": "active=0.25",
    "sparsity=0.75": "give the share that stays active, 1 - 0.75, as active=",
    "quantization=int8": "model.quantization=int8",
    "quantize=8bit": "model.quantization=int8",
    "quantize=true": "model.quantization=nf4",
    "precision=bf16": "model.dtype=bfloat16",
    "model.quantization=int4": "model.quantization=nf4",
    "load_in_4bit=true": "model.quantization=nf4",
    "model.dtype=bf16": "model.dtype=bfloat16",
    "assemble.experts=16": "experts=16",
    "num_experts=null": "experts=null",
    "target=mixtral": "assemble.target=mixtral",
    "score=S_p": "score=s_p",
    "colour=red": "python -m pipeline --cfg job lists the settings",
}


@pytest.mark.parametrize(("word", "do"), REMEDIES.items())
def test_a_word_of_another_program_is_answered_with_ours(word, do):
    with pytest.raises(InvalidSettingsError) as caught:
        start([word])
    assert [error.do for error in caught.value.errors] == [do]


@pytest.mark.parametrize(
    ("words", "do"),
    [
        (["--model=embedded"], "model=embedded"),
        (["--model", "embedded", "seed=1"], "model=embedded"),
        (["--data.path=/x"], "data.path=/x"),
        (["--dry-run"], "plan=true"),
        (["--stage=scan"], "stage=scan"),
    ],
)
def test_a_flag_is_answered_with_the_word_to_type(words, do):
    assert [error.do for error in flag_errors(words)] == [do]
    with pytest.raises(InvalidSettingsError):
        start(words)


def test_every_remedy_can_be_typed():
    """A sentence and another program are no words of ours."""
    values = {"data.max_length": "64", "train.batch": "4", "assemble.target": "mixtral", "model.dtype": "float32"}
    values["model.quantization"] = "int8"
    for key, advice in SYNONYMS.items():
        name = advice.partition("=")[0]
        if " " not in advice:
            word = advice.format(values.get(name, "/x" if name in {"model", "data", "output_dir"} else "1"))
            if name in {"plan", "fresh"}:
                word = advice.format("true")
            assert override_errors(expand_words(shlex.split(word)), sweep=False) == {}, key
