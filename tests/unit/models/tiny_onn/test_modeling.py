"""The class on carves of families that it must follow: those that see images, and those with names of their own."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from zoo.checkpoints import build
from zoo.images import image_inputs

import models.tiny_onn.register  # noqa: F401
from models.checkpoint.shards import DenseReader
from models.config import MoEShape
from models.emit import emit_checkpoint
from models.experts import slice_experts
from models.loading import load_whole
from models.structure import model_class
from models.targets.config import MOE_TARGETS

SHAPE = MoEShape(experts=4, n=24, top_k=4, always_on=32)  # all experts on, and constant gates: the dense model


def write_carve(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    """A dense model of the zoo in this number format, and its TinyONN."""
    dense, moe = folder / "dense", folder / "moe"
    build(name).to(dtype).save_pretrained(dense)
    always_on_S, neurons_EN = torch.arange(32), torch.arange(32, 128).view(4, 24)
    with DenseReader(dense) as reader:
        emit_checkpoint(
            dense, moe, target=MOE_TARGETS["tiny_onn"], shape=SHAPE,
            routers=lambda _layer: torch.zeros(4, reader.decoder.hidden),
            experts=lambda layer: slice_experts(reader.projections(layer), neurons_EN, always_on_S),
        )  # fmt: skip
    return dense, moe


def load_dense(folder: Path, dtype: torch.dtype = torch.float32):
    return model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=dtype).eval()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """Of a checkpoint in bfloat16 whose configuration names a number format for each part, as those of the hub do."""
    return write_carve(tmp_path_factory.mktemp("seeing"), "qwen2_5_vl_image", torch.bfloat16)


@pytest.fixture(scope="module")
def falcon(tmp_path_factory):
    return write_carve(tmp_path_factory.mktemp("falcon"), "falcon")


def test_no_part_of_a_carve_names_another_number_format(seeing):
    dense, moe = (json.loads((folder / "config.json").read_text()) for folder in seeing)
    assert moe["dtype"] == "bfloat16"
    for part in ("text_config", "vision_config"):
        assert dense[part]["dtype"] == "float32"
        assert not {"dtype", "torch_dtype"} & {*moe["dense"], *moe["dense"][part]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_parts_have_the_number_format_of_loading(seeing, tmp_path, dtype):
    """Also of carves whose configuration names one for each part."""
    dense, moe = seeing
    earlier = shutil.copytree(moe, tmp_path / "moe")
    config = json.loads((moe / "config.json").read_text())
    for part in (config["dense"]["text_config"], config["dense"]["vision_config"]):
        part["dtype"] = "float16"
    (earlier / "config.json").write_text(json.dumps(config))
    model, batch = load_whole(earlier, dtype=dtype), image_inputs(load_dense(dense))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    batch["pixel_values"] = batch["pixel_values"].to(dtype)
    with torch.no_grad():
        wanted = load_dense(dense, dtype)(**batch).logits
        torch.testing.assert_close(model(**batch).logits, wanted, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("beams", [1, 3])
def test_images_are_answered_as_by_the_dense_model(seeing, beams):
    """Step by step with a cache: the positions of what follows an image count its rows and columns."""
    dense, moe = load_dense(seeing[0]), AutoModelForImageTextToText.from_pretrained(seeing[1], dtype=torch.float32)
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    batch = image_inputs(dense)
    wanted, found = (model.generate(**batch, **how) for model in (dense, moe.eval()))
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-5)


def test_arguments_that_no_class_knows_are_refused(seeing):
    model = AutoModelForCausalLM.from_pretrained(seeing[1], dtype=torch.float32)
    with pytest.raises(ValueError, match="pixel_value"):
        model.generate(torch.arange(70, 80)[None], pixel_value=1)


def test_a_base_model_of_another_name_is_found(falcon):
    model = AutoModelForCausalLM.from_pretrained(falcon[1])
    assert model.base_model is model.transformer
    assert model.get_input_embeddings() is model.transformer.word_embeddings
    base, found = AutoModel.from_pretrained(falcon[1], output_loading_info=True)
    assert not found["missing_keys"]
    ids = torch.arange(70, 90)[None]
    with torch.no_grad():
        wanted = load_dense(falcon[0]).transformer(ids).last_hidden_state
        torch.testing.assert_close(base.eval()(ids).last_hidden_state, wanted, rtol=0, atol=1e-5)


def test_generation_ends_though_there_is_no_generation_config(falcon):
    dense, moe = falcon
    for folder in falcon:
        (folder / "generation_config.json").unlink(missing_ok=True)
    wanted, found = (load(folder).generation_config for load, folder in ((load_dense, dense), (load_whole, moe)))
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [getattr(found, key) for key in ids] == [getattr(wanted, key) for key in ids] == [0, 0, None]
