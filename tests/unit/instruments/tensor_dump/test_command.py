"""python -m pipeline dump: tables, comparisons, .pt files in the format of the Megatron tensor saver."""

import re
from pathlib import Path

import pytest
import torch
from unit.instruments.tensor_dump.small_model import D, Small, T, run

from instruments.errors import ConfigError
from instruments.tensor_dump.command import main
from instruments.tensor_dump.config import DumpConfig
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.tensor_dump import TensorDump
from instruments.tensor_dump.tensor_files import save_attention_tensors, save_linear_tensors


@pytest.fixture
def dump(tmp_path):
    run(tmp_path / "dump", steps=3)
    return tmp_path / "dump"


def test_show(dump, tmp_path, capsys):
    assert main(["show", str(tmp_path)]) == 1  # no dump there
    assert main(["show", str(dump)]) == 0
    out = capsys.readouterr().out
    assert "records    18, 2 modules" in out
    row = next(line for line in out.splitlines() if line.startswith("layers.*  grad_output"))
    assert row.split()[2] == "6"
    assert "7×11 7×6" in row


def test_compare_finds_the_first_divergence(dump, tmp_path, capsys):
    other = tmp_path / "other"
    model = Small()
    with torch.no_grad():
        model.layers[1].weight[3, 5] += 1e-3
    run(other, steps=3, model=model)
    assert main(["compare", str(dump), str(dump)]) == 0
    assert capsys.readouterr().out == "18 tensors compared, 0 differ\n"
    assert main(["compare", str(dump), str(other)]) == 3
    out = capsys.readouterr().out
    first = out.split("first divergence, in the order of capture\n")[1].splitlines()[1]
    assert first.split()[:3] == ["layers.1", "weight", "0"]
    assert main(["compare", str(dump), str(other), "--tolerance", "10"]) == 0
    run(tmp_path / "third", DumpConfig(modules=["layers.0"], tensors=["weight"], first_step=2), steps=3)
    assert main(["compare", str(dump), str(tmp_path / "third")]) == 0
    assert "only in" in capsys.readouterr().out


def test_compare_of_two_formats_tells_rounding_from_values_that_are_lost(tmp_path, capsys):
    for dtype in (torch.float32, torch.float16):
        model = Small()
        with torch.no_grad():
            model.layers[0].weight.fill_(1.0)  # the same in both
            model.layers[1].bias[0] = 7e4
        folder, config = tmp_path / str(dtype), DumpConfig(tensors=["weight", "input", "output"])
        with TensorDump(model.to(dtype), folder, config, environment={}):
            model(torch.full((T, D), 1 / 3, dtype=dtype)).backward()
    assert main(["compare", str(tmp_path / "torch.float32"), str(tmp_path / "torch.float16")]) == 3
    out = capsys.readouterr().out
    assert out.startswith("6 tensors compared, 5 differ\n")
    largest, lost = out.split("largest relative distances\n")[1].split("1 with NaN, inf or another shape\n")
    assert "layers.0  weight" not in out
    assert "nan" not in largest
    assert lost.splitlines()[1].split() == ["layers.1", "output", "0", "nan", "nan", "nan"]


NAME = re.compile(
    r"\d{8}_\d{6}_(\d{4})_(linear)_L([01])_(forward|backward)_(fp32|mxfp8)_(input|weight|grad_output)\.pt"
)
INFO = {"shape", "dtype", "device", "requires_grad", "is_leaf", "min", "max", "mean", "std"}
FACTS = ["layer_type", "layer_idx", "operation", "quant_type", "tensor_name"]


def open_pt(path):
    return torch.load(path, weights_only=True)  # noqa: TID251 - a file this test wrote


@pytest.mark.parametrize("label", [None, "mxfp8"])
def test_export_writes_what_old_readers_open(dump, tmp_path, capsys, label):
    if label:
        run(dump := tmp_path / "labelled", DumpConfig(quant_type=label), steps=3)
    assert main(["export", str(dump), str(tmp_path / "pt")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'pt'}: 18 files\n"
    paths = sorted((tmp_path / "pt").iterdir(), key=lambda path: path.name.split("_")[2])
    with DumpReader(dump) as reader:
        for path, record in zip(paths, reader.records, strict=True):
            named, found = NAME.fullmatch(path.name), open_pt(path)
            assert list(found) == ["tensor", "tensor_info", "metadata"]
            assert torch.equal(found["tensor"], reader.load(record))
            info, metadata = found["tensor_info"], found["metadata"]
            assert info.keys() == INFO
            assert info["is_leaf"] is (record.source.module == "layers.0" or record.source.tensor != "input")
            assert (info["shape"], info["min"]) == ([*record.shape], float(found["tensor"].min()))
            assert [str(metadata[name]) for name in FACTS] == [*named.groups()[1:]]
            assert metadata["quant_type"] == (label or "fp32")
            assert (int(named[1]), metadata["module"]) == (record.counter, record.source.module)
            assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", metadata["save_time"])


def test_code_written_against_the_tensor_saver(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path / "logs"))
    query, key, value = torch.randn(3, 2, 4, 8, 16, dtype=torch.bfloat16)
    results = save_attention_tensors(
        query=query, key=key, value=value, quant_type="hifp8", operation="forward", layer_idx=0,
        metadata={"experiment": "test_run"}, phase="pre", component="FA",
    )  # fmt: skip
    results |= save_linear_tensors(torch.randn(3, 5), torch.randn(4, 5), "mxfp8", "backward")
    found = open_pt(results["query"])
    assert torch.equal(found["tensor"], query)
    assert found["tensor_info"].keys() == INFO
    assert found["metadata"].keys() >= {*FACTS, "save_time"}
    assert (found["metadata"]["experiment"], found["metadata"]["phase"]) == ("test_run", "pre")
    names = [Path(path).name.split("_") for path in results.values()]
    tensors = ("query", "key", "value", "input", "weight")
    expected = [["attention", "L0", "forward", "hifp8"]] * 3 + [["linear", "Lnone", "backward", "mxfp8"]] * 2
    assert [name[3:] for name in names] == [[*one, f"{name}.pt"] for one, name in zip(expected, tensors, strict=True)]
    assert [int(name[2]) - int(names[0][2]) for name in names] == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="int3"):
        save_linear_tensors(query, key, "int3")
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "false")
    assert save_linear_tensors(query, key, "bf16") == {"input": None, "weight": None}
    assert len(list((tmp_path / "logs").iterdir())) == 5
