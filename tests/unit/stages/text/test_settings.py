import pytest

from pipeline.check import field_errors
from stages.text.cache_key import check_data
from stages.text.config import DataConfig, check_length, check_settings


def messages_of(**settings):
    return [str(error) for error in check_settings(DataConfig(**settings))]


def test_the_defaults_are_right():
    assert messages_of() == []
    assert messages_of(kind="text", path="a.jsonl", labels="completion") == []
    assert messages_of(kind="hub", name="a/b", heldout_split="test") == []
    assert messages_of(labels="generated", max_length=96, temperature=0.7) == []


@pytest.mark.parametrize("share", [1.0, 0.0, -1.0, float("nan")])
def test_a_share_is_between_0_and_1(share):
    (error,) = messages_of(heldout_share=share)
    assert error.startswith(f"data.heldout_share={share} is not between 0 and 1, both excluded")


def test_every_field_has_its_own_rule():
    wrong = DataConfig(kind="csv", packing="tight", labels="some", separator="x", max_length=1, temperature=-1)
    assert [str(error).splitlines()[0] for error in field_errors(wrong, "data.")] == [
        "data.kind=csv is none of python_stdlib, text, hub, mixture",
        "data.packing=tight is none of packed, single",
        "data.labels=some is none of full_sequence, completion, generated",
        "data.temperature=-1 must be at least 0",
        "data.separator=x is none of eos, blank_line",
        "data.max_length=1 must be at least 2",
    ]
    assert check_data(wrong) == []


def test_fewer_tokens_than_one_sequence():
    assert messages_of(tokens=10, heldout_tokens=20, max_length=30) == [
        "data.tokens=10 is less than one sequence of data.max_length=30 tokens\n  do:    data.tokens=30",
        "data.heldout_tokens=20 is less than one sequence of data.max_length=30 tokens\n"
        "  do:    data.heldout_tokens=30",
    ]


@pytest.mark.parametrize(
    ("settings", "do"),
    [
        ({"labels": "completion"}, "data.labels=full_sequence"),
        ({"kind": "text"}, "data.path=FILE_OR_FOLDER"),
        ({"kind": "text", "path": "a.txt", "heldout_path": "./a.txt"}, "data.heldout_path=null"),
        ({"kind": "hub"}, "data.name=Salesforce/wikitext"),
        ({"kind": "hub", "name": "a/b", "heldout_split": "train"}, "data.heldout_split=null"),
    ],
)
def test_settings_that_do_not_fit_the_source(settings, do):
    (message,) = messages_of(**settings)
    assert message.endswith(f"\n  do:    {do}")


def test_a_prompt_and_its_continuation_fit_into_a_sequence():
    (error,) = messages_of(labels="generated", prompt_tokens=20, max_new_tokens=45, max_length=64)
    assert error.startswith("data.prompt_tokens=20 and data.max_new_tokens=45 do not fit into data.max_length=64")


def lengths_of(source, max_length):
    return [str(error) for error in check_length(DataConfig(max_length=max_length), source)]


def test_sequences_longer_than_the_model_reads():
    (error,) = lengths_of({"max_position_embeddings": 300}, 301)
    assert error.startswith("data.max_length=301 is longer than the model's longest sequence, 300 tokens")
    assert lengths_of({"max_position_embeddings": 300}, 300) == []
    assert lengths_of({}, 10**9) == []


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}


@pytest.mark.parametrize(
    ("source", "longest"),
    [
        pytest.param({"max_position_embeddings": 200, "rope_scaling": YARN}, 800, id="Qwen2.5 with yarn"),
        pytest.param({"max_position_embeddings": 200, "rope_parameters": YARN}, 800, id="transformers 5"),
        pytest.param({"max_position_embeddings": 900, "rope_scaling": YARN}, 900, id="Llama 3.1: stated in full"),
        pytest.param(
            {"max_position_embeddings": 300, "rope_scaling": {"type": "linear", "factor": 2.0}}, 600, id="linear"
        ),
        pytest.param({"max_position_embeddings": 300, "rope_scaling": None}, 300, id="plain"),
        pytest.param({"max_position_embeddings": 300, "rope_parameters": {"rope_theta": 1e4}}, 300, id="plain 5"),
    ],
)
def test_stretched_positions_count(source, longest):
    assert lengths_of(source, longest) == []
    assert len(lengths_of(source, longest + 1)) == 1


@pytest.mark.parametrize("size", ["many", -3, float("inf"), [300], 10**40])
def test_a_size_that_is_none_limits_nothing(size):
    assert lengths_of({"max_position_embeddings": size}, 301) == []


@pytest.mark.parametrize("scaling", ["yarn", [4], {"factor": "4"}, {"factor": float("nan")}, {"factor": -4}])
def test_positions_stretched_by_nothing(scaling):
    assert lengths_of({"max_position_embeddings": 300, "rope_scaling": scaling}, 300) == []
    assert len(lengths_of({"max_position_embeddings": 300, "rope_scaling": scaling}, 301)) == 1
