import pytest

from models import check, quantization
from models.check import check_kind, check_placement, check_quantization
from models.config import ModelConfig
from models.quantization import stored_quantization

NF4 = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
INT8 = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}}
GPTQ = {"quantization_config": {"quant_method": "gptq"}}


def texts(model, config=None):
    return [str(error) for error in check_quantization(model, config or {})]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        (NF4, "nf4"),
        (INT8, "int8"),
        (GPTQ, "gptq"),
        ({"quantization_config": {"load_in_4bit": True}}, "fp4"),
        ({"quantization_config": {"bits": 3}}, "unknown"),
    ],
)
def test_how_a_checkpoint_is_stored(config, kind):
    assert stored_quantization(config) == kind


@pytest.mark.parametrize(("asked", "config"), [("nf4", {}), ("int8", {}), ("none", NF4), ("nf4", NF4), ("none", INT8)])
def test_what_fits_is_not_refused(asked, config):
    assert texts(ModelConfig(quantization=asked), config) == []


def test_another_quantisation_than_the_stored_one():
    assert texts(ModelConfig(quantization="int8"), NF4) == [
        "model.quantization=int8, but the checkpoint is stored in nf4\n"
        "  where: model.quantization\n"
        "  do:    model.quantization=none, which takes it as it is, or give the unquantised checkpoint"
    ]


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ({}, None),
        ({"kind": "hub", "name": "a/b", "revision": "v2"}, None),
        ({"kind": "local", "path": "/x"}, None),
        (
            {"name": "a/b", "revision": "v2"},
            "only model=hub reads model.name=a/b and model.revision=v2\n"
            "  where: model.kind=embedded\n  do:    model=hub model.name=a/b model.revision=v2",
        ),
        (
            {"kind": "local", "path": "/x", "revision": "v2"},
            "only model=hub reads model.revision=v2\n  where: model.kind=local\n  do:    model.revision=null",
        ),
        (
            {"kind": "hub", "name": "a/b", "path": "/my x"},
            "only model=local reads model.path=/my x\n  where: model.kind=hub\n  do:    model=local 'model.path=/my x'",
        ),
    ],
)
def test_settings_of_another_kind_of_source_are_refused(model, error):
    assert [str(found) for found in check_kind(ModelConfig(**model))] == ([error] if error else [])


def test_a_source_is_named_by_its_kind(tmp_path):
    assert ModelConfig(kind="hub", label="q", name="a/b").source_name == "a/b"
    assert ModelConfig(kind="local", label="q", path=str(tmp_path / "b" / ".." / "c")).source_name == "c"
    assert ModelConfig(label="q", name="a/b").source_name == "q"


def test_other_methods():
    assert texts(ModelConfig(quantization="nf4"), GPTQ) == [
        "weights quantised by gptq cannot be sliced\n"
        "  where: quantization_config in config.json\n"
        "  do:    give the unquantised checkpoint, or one stored by bitsandbytes"
    ]


@pytest.mark.parametrize(
    ("model", "config", "what"),
    [
        (ModelConfig(quantization="fp4"), {}, "model.quantization=fp4"),
        (ModelConfig(), INT8, "a checkpoint stored in int8"),
    ],
)
def test_without_bitsandbytes(monkeypatch, model, config, what):
    monkeypatch.setattr(check, "find_spec", lambda _name: None)
    monkeypatch.setattr(quantization, "machine", lambda: "x86_64")
    monkeypatch.setattr(quantization.sys, "platform", "linux")
    assert texts(model, config) == [
        f"{what} needs the package bitsandbytes\n  where: model.quantization\n  do:    pip install -e '.[quantization]'"
    ]
    assert texts(ModelConfig()) == []


def test_a_platform_that_bitsandbytes_is_not_made_for(monkeypatch):
    monkeypatch.setattr(check, "find_spec", lambda _name: None)
    monkeypatch.setattr(quantization, "machine", lambda: "riscv64")
    assert texts(ModelConfig(quantization="nf4")) == [
        "model.quantization=nf4 needs the package bitsandbytes, which is not made for linux riscv64\n"
        "  where: model.quantization\n"
        "  do:    model.quantization=none and an unquantised checkpoint"
    ]


@pytest.mark.parametrize("amount", ["20GiB", "512 MB", "1.5GB", "60KB", "900kb"])
def test_amounts_of_memory(amount):
    assert list(check_placement(ModelConfig(device_map="auto", gpu_memory=amount, cpu_memory=amount))) == []
    assert list(check_placement(ModelConfig(hidden_memory=amount))) == []


def test_no_amounts_of_memory():
    errors = check_placement(ModelConfig(device_map="auto", gpu_memory="20", cpu_memory="much", hidden_memory="half"))
    assert [str(error) for error in errors] == [
        "model.gpu_memory=20 is no amount of memory\n  where: model.gpu_memory\n  do:    model.gpu_memory=20GiB",
        "model.cpu_memory=much is no amount of memory\n  where: model.cpu_memory\n  do:    model.cpu_memory=20GiB",
        "model.hidden_memory=half is no amount of memory\n"
        "  where: model.hidden_memory\n"
        "  do:    model.hidden_memory=20GiB",
    ]


def test_limits_that_nobody_would_keep():
    errors = check_placement(ModelConfig(cpu_memory="8GiB"))
    assert [str(error) for error in errors] == [
        "model.cpu_memory=8GiB has no effect on a model that is all on one device\n"
        "  where: model.cpu_memory\n"
        "  do:    model.device_map=auto model.cpu_memory=8GiB"
    ]
