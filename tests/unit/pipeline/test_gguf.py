"""`pipeline.gguf` with folders that are no carve or not complete, and the remedies that it names."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from unit.pipeline.test_serving import run_gguf, write_carve

from pipeline import gguf


@pytest.fixture(scope="module")
def carve(tmp_path_factory):
    return write_carve(tmp_path_factory.mktemp("carve"), "qwen3_moe", "qwen3", 0)


def test_an_adapter_is_not_taken_for_a_checkpoint(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    code, said = run_gguf(capsys, tmp_path, tmp_path / "x.gguf")
    assert (code, said.splitlines()[0]) == (1, "an adapter of PEFT, no checkpoint")
    assert "merge_and_unload" in said


def test_an_architecture_that_is_no_name_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": ["qwen3_moe"]}')
    code, said = run_gguf(capsys, tmp_path, tmp_path / "x.gguf")
    assert (code, said.splitlines()[0]) == (1, "['qwen3_moe'] is no architecture that a carve becomes")


def test_remedies_can_be_pasted_where_names_have_spaces(tmp_path, capsys, carve):
    dense = tmp_path / "a dense model"
    dense.symlink_to(carve.parent / "dense")
    _code, said = run_gguf(capsys, dense, tmp_path / "x.gguf")
    assert shlex.split(said.splitlines()[-1])[-1] == f"model.path={dense}"
    _code, said = run_gguf(capsys, carve, tmp_path / "no folder/x.gguf")
    assert shlex.split(said.splitlines()[-1])[1:] == ["mkdir", "-p", str(tmp_path / "no folder")]


def test_weights_without_a_tokenizer_are_refused(tmp_path, capsys, carve):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(carve / name)
    code, said = run_gguf(capsys, tmp_path, tmp_path / "x.gguf")
    assert (code, said.splitlines()[0]) == (1, "no tokenizer.json, and a GGUF file needs one")


def test_the_converter_reads_a_tokenizer_that_transformers_5_wrote(tmp_path, carve, monkeypatch):
    moe = shutil.copytree(carve, tmp_path / "moe")
    (moe / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    seen = {}

    def run(_python, _step, request):
        seen.update(json.loads(Path(request["checkpoint"], "tokenizer_config.json").read_text()))
        Path(request["out"]).touch()

    monkeypatch.setattr(gguf, "run_client", run)
    monkeypatch.setattr(gguf, "_find_converter", lambda _clients: (tmp_path, Path("python")))
    gguf.write_gguf(moe, tmp_path / "x.gguf", "f16", gguf.Clients(None, ()))
    assert seen == {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert {path.name for path in tmp_path.iterdir()} == {"moe", "x.gguf"}


def test_what_the_disk_refuses_has_a_remedy_of_this_command(tmp_path, capsys, carve, monkeypatch):
    def refuse(*_args, **_keys):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(gguf, "TemporaryDirectory", refuse)
    monkeypatch.setattr(gguf, "_find_converter", lambda _clients: (tmp_path, Path("python")))
    _code, said = run_gguf(capsys, carve, tmp_path / "x.gguf")
    assert "output_dir" not in said
