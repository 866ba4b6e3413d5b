"""stage=diagnose: its output, its reruns, and input that it refuses."""

import json

import pytest
from pico import change_config, write_pico

from instruments.errors import FAILED, INVALID
from pipeline.cli import run_command


def diagnose(tmp_path, *words):
    code = run_command(["stage=diagnose", "diagnose.tokens=24", f"output_dir={tmp_path}", *words])
    folders = sorted(tmp_path.glob("artifacts/*/diagnose/*"))
    return code, folders


def test_the_embedded_model_is_healthy_in_bf16(tmp_path, capsys):
    code, (folder,) = diagnose(tmp_path)
    said = capsys.readouterr().out
    assert code == 0, said
    assert "FP32 against bfloat16 (autocast): ok" in said
    assert "67 outputs" in said
    found = json.loads((folder / "auto_diff.json").read_text())
    assert found["verdict"] == "ok"
    assert [output["name"] for output in found["outputs"]][-2:] == ["lm_head", "(model)['logits']"]
    assert (folder / "auto_diff.png").read_bytes().startswith(b"\x89PNG")
    # The model may have changed while the settings did not: the stage runs again, into the same folder.
    code, folders = diagnose(tmp_path)
    assert (code, folders) == (0, [folder])
    assert "kept from an earlier run" not in capsys.readouterr().out


def test_a_cast_model_is_loaded_as_for_use(tmp_path, capsys):
    words = (
        "diagnose.auto_diff.mode=cast",
        "diagnose.auto_diff.precision=bf16",
        "diagnose.auto_diff.modules=[*.layers.1.*]",
    )
    code, (folder,) = diagnose(tmp_path, *words)
    assert code == 0
    assert "FP32 against bfloat16 (cast): ok" in capsys.readouterr().out
    outputs = json.loads((folder / "auto_diff.json").read_text())["outputs"]
    assert all(".layers.1." in output["name"] for output in outputs[:-1])
    assert outputs[-1]["name"] == "(model)['logits']"
    assert {output["dtype"] for output in outputs} == {"bfloat16"}


def test_activations_are_analysed(tmp_path, capsys):
    code, (folder,) = diagnose(tmp_path, "check=analyze_tensor", "diagnose.analyze_tensor.modules=[*.layers.0.*]")
    said = capsys.readouterr().out
    assert code == 0, said
    found = json.loads((folder / "analyze_tensor.json").read_text())
    assert {loss["format"] for tensor in found for loss in tensor["losses"]} == {"bfloat16", "float16"}


def test_what_is_not_there(tmp_path, capsys):
    words = ("check=analyse", "diagnose.checkpoint=nowhere")
    assert diagnose(tmp_path, *words) == (INVALID, [])
    said = capsys.readouterr().err
    assert "check=analyse is none of auto_diff" in said
    assert "nowhere holds no config.json, so no checkpoint" in said
    assert diagnose(tmp_path, "diagnose.auto_diff.modules=[h.*]")[0] == INVALID
    assert diagnose(tmp_path, "check=analyze_tensor", "diagnose.analyze_tensor.modules=[h.*]")[0] == INVALID
    assert "no module that ran is called h.*" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 48}, "config.json says a model of "),
        ({"model_type": "vit"}, "architectures and model_type in config.json"),
    ],
    ids=["larger", "no language model"],
)
def test_a_checkpoint_whose_config_belongs_to_another_model(tmp_path, capsys, changes, said):
    folder = write_pico(tmp_path / "pico", "llama", tokenizer=True)
    change_config(folder, **changes)
    code, folders = diagnose(tmp_path / "outputs", "check=auto_diff", f"diagnose.checkpoint={folder}")
    error = capsys.readouterr().err
    assert (code, folders) == (FAILED, [])
    assert said in error
    assert str(folder) in error or said.startswith("architectures")
    assert "  do: " in error
    assert "Traceback" not in error
