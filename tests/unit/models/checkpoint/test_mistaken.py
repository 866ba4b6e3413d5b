"""Folders that people take for a checkpoint."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from models.check import check_source
from models.config import ModelConfig
from models.source import EMBEDDED


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(EMBEDDED, tmp_path / "model")


def only_error(path):
    (error,) = check_source(ModelConfig(kind="local", path=str(path), label="x"))
    return error


@pytest.mark.parametrize(
    ("name", "named"), [("adapter_config.json", "merge_and_unload"), ("m.Q4_K_M.gguf", 'gguf_file="m.Q4_K_M.gguf"')]
)
def test_an_adapter_and_a_gguf_are_no_model(folder, name, named):
    for file in ("config.json", "model.safetensors"):
        (folder / file).unlink()
    (folder / name).write_text("{}")
    assert named in only_error(folder).do


def test_the_path_of_a_gguf_itself(folder):
    (folder / "m.gguf").touch()
    assert "gguf_file=" in only_error(folder / "m.gguf").do


@pytest.mark.parametrize(
    ("names", "last"),
    [(["snapshots/abc"], "snapshots/abc"), (["checkpoint-90", "checkpoint-500", "checkpoint-7"], "checkpoint-500")],
)
def test_a_folder_of_several_models_names_the_newest(folder, tmp_path, names, last):
    for name in names:
        shutil.copytree(folder, tmp_path / "all" / name)
    assert only_error(tmp_path / "all").do == f"model={tmp_path / 'all' / last}"


def test_a_pointer_of_git_lfs_is_no_weights(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n")
    assert only_error(folder).do.startswith("git lfs pull")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_names_that_another_program_put_before_the_models_own(folder, prefix):
    tensors = load_file(folder / "model.safetensors")
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    error = only_error(folder)
    assert prefix in error.what
    assert "save model" in error.do
