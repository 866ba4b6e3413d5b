"""What clients see of a checkpoint: no Python, no settings that name any, and the class of its architecture."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from pico import change_config
from unit.pipeline.served_carves import make_hostile, write_carve, write_gguf_package, write_wrapped_carve

from instruments.errors import CheckpointError, UserError
from models.source import read_config
from models.targets.tiny_onn import AUTO_CLASSES, CODE_FILES
from pipeline import clients, gguf, serve_check

# A converter that runs all Python of a folder, as llama.cpp's does for classes with `trust_remote_code=True`.
CONVERTER = """
import json, runpy, sys
from pathlib import Path
from conversion.base import TextModel
def main():
    folder, out = Path(sys.argv[1]), Path(sys.argv[3])
    for file in folder.rglob("*.py"):
        runpy.run_path(str(file))
    settings = {path.name: json.loads(path.read_text()) for path in folder.glob("*config.json")}
    out.write_text(json.dumps(settings | {"tensors": TextModel().index_tensors()}))
    with open(Path(__file__).parent / "converted", "a") as log:
        log.write(f"{settings['config.json']['architectures'][0]} {sorted(path.name for path in folder.iterdir())}\\n")
"""
BASE = """
class TextModel:
    get_vocab_base_pre = _set_vocab_glm = _set_vocab_gpt2 = None
    def index_tensors(self):
        return {"model.embed_tokens.weight": "one tensor for both"}
"""
SEEN = {
    "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
}  # fmt: skip


@pytest.fixture
def llama_cpp(tmp_path):
    """Folders of llama.cpp and of Python packages that clients need."""
    folder = tmp_path / "llama.cpp"
    (folder / "conversion").mkdir(parents=True)
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    (folder / "conversion" / "base.py").write_text(BASE)
    write_gguf_package(folder)
    (folder / "conversion" / "hunyuan.py").write_text("class HunYuanMoEModel: ...")
    packages = tmp_path / "packages"
    for name in ("llama_cpp", "sentencepiece"):
        (packages / f"{name}-0.3.30.dist-info").mkdir(parents=True)
        (packages / f"{name}-0.3.30.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 0.3.30")
        (packages / f"{name}-0.3.30.dist-info" / "top_level.txt").write_text(name)
        (packages / f"{name}.py").write_text("")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return ["--llama-cpp", str(folder), "--python", str(python)]


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "the Python of the checkpoint was run"


def test_the_converter_runs_no_python_of_a_checkpoint(tmp_path, carve, llama_cpp, marker):
    hostile = make_hostile(carve, tmp_path / "moe", marker)
    assert gguf.main([str(hostile), str(tmp_path / "x.gguf"), "--type", "f16", *llama_cpp]) == 0
    assert not marker.exists()
    assert "auto_map" not in (tmp_path / "x.gguf").read_text()
    (log,) = (tmp_path / "llama.cpp" / "converted").read_text().splitlines()
    assert log.startswith("Qwen2MoeForCausalLM")
    assert ".py" not in log


@pytest.mark.parametrize(
    ("target", "source", "tie", "written"),
    [("qwen2_moe", "qwen2", True, True), ("qwen2_moe", "qwen2", False, False), ("qwen3_moe", "qwen3", True, False)],
)
def test_classes_that_llama_cpp_does_not_tie_get_the_input_embedding_twice(
    tmp_path, llama_cpp, target, source, tie, written
):
    moe = write_carve(tmp_path, target, source, 0, tie=tie)
    assert gguf.main([str(moe), str(tmp_path / "x.gguf"), "--type", "f16", *llama_cpp]) == 0
    tensors = json.loads((tmp_path / "x.gguf").read_text())["tensors"]
    assert tensors.pop("lm_head.weight", None) == (tensors["model.embed_tokens.weight"] if written else None)


@pytest.fixture(scope="module", params=["mixtral", "qwen3_5_moe_text", "gemma4_text"])
def wrapped(request, tmp_path_factory):
    sources = {"mixtral": ("mistral3_image", 0), "qwen3_5_moe_text": ("qwen3_5_image", 32)}
    source = sources.get(request.param, ("gemma4_image", 32))
    return write_wrapped_carve(tmp_path_factory.mktemp("wrapped"), request.param, *source)


def test_a_carve_that_sees_images_is_converted_as_its_own_class(tmp_path, wrapped, llama_cpp, marker, capsys):
    hostile = make_hostile(wrapped, tmp_path / "moe", marker)
    config = read_config(hostile)
    change_config(hostile, text_config=config["text_config"] | {"architectures": ["EvilForCausalLM"]})
    assert gguf.main([str(hostile), str(tmp_path / "x.gguf"), "--type", "bf16", *llama_cpp]) == 0
    assert not marker.exists()
    seen = json.loads((tmp_path / "x.gguf").read_text())["config.json"]
    assert seen["architectures"] == config["architectures"]
    assert seen["text_config"] == config["text_config"]
    assert "without the images" in capsys.readouterr().out


def test_types_that_lose_the_always_on_neurons_are_refused(tmp_path, llama_cpp, capsys):
    for always_on, code in ((32, 2), (0, 0)):
        moe = write_wrapped_carve(tmp_path / str(always_on), "gemma4_text", "gemma4_image", always_on)
        assert gguf.main([str(moe), str(tmp_path / f"{always_on}.gguf"), *llama_cpp]) == code
    assert "q8_0 makes the always-on neurons 0" in capsys.readouterr().err


def test_serve_check_runs_no_python_of_the_carve(tmp_path, carve, llama_cpp, marker, monkeypatch):
    hostile = make_hostile(carve, tmp_path / "moe", marker)
    monkeypatch.setattr(
        serve_check.Check, "_transformers", lambda *_: {"log_probabilities": [-1.5], "best": [3], "tokens": []}
    )
    serve_check.main([str(hostile), "--types", "f16", *llama_cpp])
    assert not marker.exists()
    (moe,) = (tmp_path / "llama.cpp" / "converted").read_text().splitlines()
    assert moe.startswith("Qwen2MoeForCausalLM")


@pytest.mark.parametrize("program", [gguf, serve_check])
def test_architectures_of_another_class_are_refused(program, tmp_path, carve, capsys):
    hostile = shutil.copytree(carve, tmp_path / "moe")
    change_config(hostile, architectures=["XverseForCausalLM"])
    assert program.main([str(hostile), *([str(tmp_path / "x.gguf")] if program is gguf else [])]) == 1
    assert "XverseForCausalLM" in capsys.readouterr().err


def test_clients_see_what_a_carve_holds_and_no_other_file(tmp_path, carve):
    moe = shutil.copytree(carve, tmp_path / "moe")
    change_config(moe, "generation_config.json", do_sample=False)
    (moe / "README.md").write_text("# a card")
    change_config(moe, attn_implementation="flash_attention_2", nested={"auto_map": {}, "kept": 1})
    for name in ("adapter.bin", "custom.jinja", "requirements.txt", "notes.json"):
        (moe / name).write_text("{}")
    with clients.readable_copy(moe) as seen:
        assert {path.name for path in seen.iterdir()} == SEEN
        assert (seen.name, (seen / "model.safetensors").resolve()) == ("moe", moe / "model.safetensors")
        config = json.loads((seen / "config.json").read_text())
    assert config == json.loads((carve / "config.json").read_text()) | {"nested": {"kept": 1}}
    assert not seen.exists()


def test_tiny_onn_is_seen_with_the_projects_own_code(tmp_path):
    moe = write_carve(tmp_path, "tiny_onn", "qwen3", 64)
    (moe / CODE_FILES[0]).write_text("raise SystemExit('changed')")
    change_config(moe, auto_map={"AutoConfig": "evil.Evil", "AutoTokenizer": "evil.Evil"})
    with clients.readable_copy(moe) as seen:
        code = Path(clients.__file__).parents[1] / "models" / "tiny_onn"
        assert all((seen / name).read_text() == (code / name).read_text() for name in CODE_FILES)
        assert json.loads((seen / "config.json").read_text())["auto_map"] == {"AutoConfig": AUTO_CLASSES["AutoConfig"]}


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000])
def test_settings_without_a_meaning_are_refused(tmp_path, carve, content):
    moe = shutil.copytree(carve, tmp_path / "moe")
    (moe / "special_tokens_map.json").write_text(content)
    with pytest.raises(CheckpointError):
        clients.readable_copy(moe).__enter__()


def test_a_client_that_the_system_kills_has_no_last_line(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Loading weights: 100%' >&2\nkill -9 $$\n")
    python.chmod(0o755)
    with pytest.raises(UserError, match=r"^transformers was killed, most likely for lack of memory"):
        clients.run_client(python, "transformers", {})


@pytest.mark.parametrize("safe", ["", "1"])
def test_a_client_imports_its_own_gguf(tmp_path, monkeypatch, safe):
    """And not `pipeline/gguf.py`, which is in the folder of the script."""
    client = "import gguf\nllama_model_quantize_default_params = lambda: gguf\nLLAMA_FTYPE_MOSTLY_F16 = 1\n"
    (tmp_path / "llama_cpp.py").write_text(f"{client}llama_model_quantize = lambda *_: gguf.STATUS\n")
    (tmp_path / "gguf.py").write_text("STATUS = 0")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONSAFEPATH", safe)
    asked = {"source": "a", "out": "b", "outtype": "f16", "threads": 1}
    assert clients.run_client(python, "quantise", asked) == {"out": "b"}


def test_the_clients_own_packages_are_not_this_projects(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "path=$PYTHONPATH offline=$HF_HUB_OFFLINE" >&2\nexit 3\n')
    python.chmod(0o755)
    monkeypatch.setitem(os.environ, "PYTHONPATH", "here")
    with pytest.raises(UserError, match=r"^probe failed: path= offline=1"):
        clients.run_client(python, "probe", {})
