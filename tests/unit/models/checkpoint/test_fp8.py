"""FP8 checkpoints: weights are decoded while they are read, for the stream and for transformers' model alike."""

import json
import math
import shutil

import pytest
import torch
from pico import change_config, edited_tensors, write_pico
from safetensors.torch import load_file, save_file

from instruments.errors import CheckpointError
from models.check import check_source
from models.checkpoint.folder import check_shards
from models.checkpoint.shards import DenseReader
from models.config import ModelConfig
from models.loading import load_dense
from models.quantization import stored_quantization

E4M3 = torch.float8_e4m3fn
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_pico(tmp_path_factory.mktemp("plain"), "llama", dtype=torch.bfloat16)


def block_scales(weight, block):
    """The largest magnitude of each block, as a scale to 448."""
    rows, columns = (math.ceil(size / side) for size, side in zip(weight.shape, block, strict=True))
    grid = torch.zeros(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = weight[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
            grid[row, column] = part.abs().max() / 448
    return grid


def power_above(scales):
    return 2 ** scales.log2().ceil()


def expanded(scales, shape, block):
    return scales.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


def store_fp8(plain, folder, form, block=(16, 8)):
    """Write the Linear layers of a plain checkpoint in FP8; return the decoded weights by the formula."""
    shutil.copytree(plain, folder)
    tensors, decoded = load_file(plain / "model.safetensors"), {}
    for name, weight in [*tensors.items()]:
        if not name.endswith("_proj.weight"):
            continue
        wide = weight.float()
        if form in {"blocks", "exponents"}:
            scales = block_scales(wide, block)
            scales = power_above(scales).to(torch.float8_e8m0fnu) if form == "exponents" else scales
            every, stored = expanded(scales.float(), wide.shape, block), {"weight_scale_inv": scales}
        elif form in {"rows", "fbgemm"}:
            every = wide.abs().amax(1, keepdim=True) / 448
            stored = {"weight_scale": every.to(torch.bfloat16)}
            every = stored["weight_scale"].float()
            stored |= {"input_scale_ub": torch.tensor([1200.0])} if form == "fbgemm" else {}
        else:
            every = wide.abs().max() / 448
            named = ("weight_scale_inv", "activation_scale") if form == "static" else ("weight_scale", "input_scale")
            stored = dict(zip(named, (every, torch.tensor(3.0)), strict=True))
        tensors[name] = (wide / every).to(E4M3)
        decoded[name] = (tensors[name].float() * every).to(torch.bfloat16)
        tensors |= {f"{name.removesuffix('weight')}{key}": tensor for key, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {"weight_block_size": list(block) if block else None}
    methods = {"fbgemm": {"quant_method": "fbgemm_fp8"}, "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", **sizes}
    change_config(folder, quantization_config=methods.get(form, fp8))
    return decoded


@pytest.mark.parametrize(
    ("form", "block"),
    [
        *((form, block) for form in ("blocks", "exponents") for block in ((16, 8), (7, 9))),
        *((form, None) for form in ("rows", "tensor", "static", "fbgemm", "modelopt")),
    ],
)
def test_weights_are_decoded_by_the_formula_for_stream_and_model(plain, tmp_path, form, block):
    decoded = store_fp8(plain, tmp_path / "fp8", form, block)
    settings = ModelConfig(kind="local", path=str(tmp_path / "fp8"))
    assert check_source(settings) == []
    model = load_dense(settings, tmp_path / "fp8").state_dict()
    with DenseReader(tmp_path / "fp8") as reader:
        assert {*reader.names} == {*load_file(plain / "model.safetensors")}
        for name, weight in decoded.items():
            assert reader.dtype(name) == torch.bfloat16
            assert torch.equal(reader.tensor(name), weight)
            assert torch.equal(model[name], weight.float())
        assert torch.equal(reader.projection(1, "gate"), decoded[GATE])


@pytest.mark.parametrize(
    ("group", "sides"),
    [
        ({"strategy": "channel"}, (1, 64)),
        ({"strategy": "tensor"}, (64, 64)),
        ({"strategy": "block", "block_structure": [8, 8]}, (8, 8)),
        ({"strategy": "group", "group_size": 8}, (1, 8)),
        ({"strategy": "group", "group_size": 8, "scale_dtype": torch.uint8}, (1, 8)),  # MXFP8
    ],
)
def test_weights_of_compressed_tensors_are_decoded_as_by_it(plain, tmp_path, group, sides):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = quantization.QuantizationArgs(num_bits=8, type="float", symmetric=True, **group)
    scheme, powers = quantization.QuantizationScheme(targets=["Linear"], weights=weights), "scale_dtype" in group
    kind = compressors.MXFP8QuantizationCompressor if powers else compressors.FloatQuantizationCompressor
    folder, tensors, decoded = shutil.copytree(plain, tmp_path / "fp8"), load_file(plain / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scales = block_scales(weight := tensors.pop(name).float(), sides)
        packed = kind.compress({"weight": weight, "weight_scale": power_above(scales) if powers else scales}, scheme)
        decoded[name] = kind.decompress(packed, scheme)["weight"].to(torch.bfloat16)
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in packed.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    named = "mxfp8-quantized" if powers else "float-quantized"
    stored = quantization.QuantizationConfig(config_groups={"group_0": scheme}, format=named).model_dump_json()
    change_config(folder, quantization_config=json.loads(stored))
    assert check_source(ModelConfig(kind="local", path=str(folder))) == []
    model = load_dense(ModelConfig(device="cpu"), folder).state_dict()
    with DenseReader(folder) as reader:
        assert {*reader.names} == {*load_file(plain / "model.safetensors")}
        for name, weight in decoded.items():
            assert torch.equal(reader.tensor(name), weight)
            assert torch.equal(model[name], weight.float())


def lose_scale(tensors, _config):
    del tensors[f"{GATE}_scale_inv"]


def cut_scale(tensors, _config):
    tensors[f"{GATE}_scale_inv"] = tensors[f"{GATE}_scale_inv"][:1].clone()


def turn_scale(tensors, _config):
    tensors[f"{GATE}_scale_inv"] = torch.ones(9, 1)


def number(tensors, _config):
    tensors[GATE] = torch.tensor(1.0).to(E4M3)


def scale_of_integers(tensors, _config):
    tensors[f"{GATE}_scale_inv"] = tensors[f"{GATE}_scale_inv"].to(torch.int32)


def forget_block(_tensors, config):
    del config["quantization_config"]["weight_block_size"]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lose_scale, "FP8 weight without a scale (weight_scale_inv or weight_scale)"),
        (cut_scale, "FP8 weight of [40, 24] with scales of [1, 3] in F32, blocks of 16 x 8"),
        (turn_scale, "FP8 weight of [40, 24] with scales of [9, 1] in F32, blocks of 16 x 8"),
        (number, "FP8 weight of [] with scales of [3, 3] in F32, blocks of 16 x 8"),
        (scale_of_integers, "FP8 weight of [40, 24] with scales of [3, 3] in I32, blocks of 16 x 8"),
        (forget_block, "FP8 weight of [16, 24] with scales of [1, 3] in F32, blocks of a size that config.json"),
    ],
)
def test_scales_that_are_missing_or_odd(plain, tmp_path, damage, what):
    store_fp8(plain, tmp_path / "fp8", "blocks")
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    with edited_tensors(tmp_path / "fp8") as tensors:
        damage(tensors, config)
    (tmp_path / "fp8/config.json").write_text(json.dumps(config))
    _entries, errors = check_shards(tmp_path / "fp8")
    found = {error.what: error for error in errors}
    error = next(error for said, error in found.items() if said.startswith(what))
    assert isinstance(error, CheckpointError)
    assert error.do == "give the unquantised checkpoint"


@pytest.mark.parametrize("method", ["compressed-tensors", "awq", "gptq", "mxfp4", "modelopt", "torchao"])
@pytest.mark.parametrize("place", ["top", "text_config"])
def test_other_formats_are_refused_by_name(tmp_path, plain, method, place):
    folder = shutil.copytree(plain, tmp_path / "model")
    with edited_tensors(folder) as tensors:
        tensors[GATE.replace("weight", "qweight")] = tensors.pop(GATE).view(torch.int32)
    stored = {"quantization_config": {"quant_method": method, "bits": 4}}
    change_config(folder, **(stored if place == "top" else {"text_config": stored}))
    (error,) = check_source(ModelConfig(kind="local", path=str(folder)))
    assert error.what == f"weights quantised by {method} cannot be sliced"
    assert error.do == "give the unquantised model, or one in FP8 or of bitsandbytes"


def test_rotated_weights_are_refused():
    stored = {"quant_method": "compressed-tensors", "format": "float-quantized", "transform_config": {}}
    assert stored_quantization({"quantization_config": stored}) == "fp8"
    stored["transform_config"] = {"config_groups": {"R1": {"type": "hadamard"}}}
    assert stored_quantization({"quantization_config": stored}) == "compressed-tensors"
