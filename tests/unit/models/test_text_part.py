"""The text part of a wrapper: its names, its config.json, and models that have none."""

import json
import shutil

import pytest
from pico import decoder_of
from zoo.checkpoints import write_checkpoint

from instruments.errors import ConfigError
from models.checkpoint.shards import DenseReader
from models.finding import find_decoder
from pipeline.check import find_errors
from pipeline.settings import compose


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory):
    return write_checkpoint("mistral3_image", tmp_path_factory.mktemp("wrapper") / "mistral3_image")


def test_the_text_part_is_a_decoder_of_the_class_for_text(wrapper):
    whole, text = find_decoder(wrapper), find_decoder(wrapper, text_only=True)
    assert (whole.model_class, text.model_class) == ("Mistral3ForConditionalGeneration", "MistralForCausalLM")
    assert (text.layers, text.embedding, text.is_wrapper) == ("model.layers", "model.embed_tokens.weight", False)
    assert text.config_json["model_type"] == "mistral"
    assert text.config_json["dtype"] == whole.config_json["dtype"]
    assert not any("vision" in name for name in text.shapes)
    with DenseReader(wrapper) as seeing, DenseReader(wrapper, text_only=True) as reading:
        assert seeing.projection(1, "down").equal(reading.projection(1, "down"))
        assert reading.tied == seeing.tied


def test_a_wrapper_whose_text_has_no_part_of_its_own_in_the_config():
    """As in the checkpoints of Qwen2-VL on the hub."""
    config = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 24}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}
    assert decoder_of(config, vision_config=vision, rope_scaling=rope).is_wrapper


def test_tokens_that_the_wrapper_names_outside_of_its_text_part_are_kept(wrapper, tmp_path):
    """But not a padding token without an embedding, as in the defaults of Idefics 3."""
    folder = shutil.copytree(wrapper, tmp_path / "mistral3_image")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 5}
    config |= {"eos_token_id": [6, 7], "pad_token_id": 10**6}
    (folder / "config.json").write_text(json.dumps(config))
    text = find_decoder(folder, text_only=True)
    expected = {"bos_token_id": 3, "eos_token_id": [6, 7], "pad_token_id": 5}
    assert text.config.items() >= expected.items()
    assert text.config_json.items() >= expected.items()


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("llama", "llama is text alone already"),
        ("qwen3_vl_image", "transformers has no class for the text part alone"),
        ("phi4_multimodal", "transformers has no class for the text part alone"),
    ],
)
def test_models_without_a_text_part_of_their_own_are_refused_before_anything_runs(tmp_path, source, what):
    folder = write_checkpoint(source, tmp_path / source)
    words = ["model=local", f"model.path={folder}", "assemble.text_only=true", f"output_dir={tmp_path}"]
    (error,) = [error for error in find_errors(compose(words)[0]) if error.where == "setting assemble.text_only"]
    assert isinstance(error, ConfigError)
    assert error.what.startswith(what)
    assert error.do == "assemble.text_only=false"
