"""Messages about a full disk and about denied access."""

import errno

import pytest
import torch
from pico import decoder_of, write_pico
from safetensors import SafetensorError

from models.checkpoint.shards import DenseReader
from models.config import MoEShape
from models.emit import emit_checkpoint
from models.experts import slice_experts
from models.finding import find_decoder
from models.targets.config import MOE_TARGETS
from pipeline.disk import expected_bytes, explain_os_error, free_bytes, nearest_existing
from stages.assemble.config import AssembleConfig

CONFIG = decoder_of("llama", intermediate_size=4864, num_key_value_heads=4, dtype="float32")


def test_room_is_measured_at_the_nearest_folder_that_exists(tmp_path):
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path
    assert free_bytes(tmp_path / "a" / "b") > 0


def test_a_folder_that_may_not_be_entered_is_the_nearest(closed):
    assert nearest_existing(closed / "x" / "y") in closed.joinpath("x").parents


def test_what_a_stage_will_write():
    shape, as_it_is, half = MoEShape(3, 8, 2, 16), AssembleConfig(), AssembleConfig(dtype="bfloat16")
    neurons = 3 * 24 * (3 * 8 + 16)
    layer = neurons + 3 * 24 + 4 * 24 * 24 + 2 * 24  # experts, router, attention, norms
    assert expected_bytes("extract", CONFIG, shape, half) == 4 * 2 * neurons
    for stage in ("assemble", "project", "train"):
        assert expected_bytes(stage, CONFIG, shape, as_it_is) == 4 * (2 * layer + 24 + 2 * 61 * 24)
        assert expected_bytes(stage, CONFIG, shape, half) == 2 * (2 * layer + 24 + 2 * 61 * 24)
    pool = MoEShape(3, 8, 2, 16, "global_pool")
    assert expected_bytes("extract", CONFIG, pool, as_it_is) == 4 * 3 * 24 * (3 * 8 + 2 * 16)
    assert expected_bytes("scan", CONFIG, shape, as_it_is) == 0
    assert expected_bytes("assemble", CONFIG, None, as_it_is) == 0


@pytest.mark.parametrize(("target", "pad_to", "dtype"), [("glm4_moe", 8, "source"), ("tiny_onn", 48, "bfloat16")])
def test_a_checkpoint_on_disk_is_as_large_as_was_said(tmp_path, target, pad_to, dtype):
    folder = write_pico(tmp_path / "dense", "llama", intermediate=4864, tie=True)
    shape, config = MoEShape(58, 64, 20, 1152), find_decoder(folder)
    neurons_EN = torch.arange(1152, 4864).view(58, 64)
    with DenseReader(folder) as reader:
        emit_checkpoint(
            folder,
            tmp_path / "moe",
            target=MOE_TARGETS[target],
            shape=shape,
            routers=lambda _layer: torch.zeros(58, 24),
            experts=lambda layer: slice_experts(reader.projections(layer), neurons_EN, torch.arange(1152)),
            dtype=dtype,
            pad_to=pad_to,
        )
    written = sum(path.stat().st_size for path in (tmp_path / "moe").glob("*.safetensors"))
    said = expected_bytes("assemble", config, shape, AssembleConfig(target=target, pad_to=pad_to, dtype=dtype))
    assert said < written < 1.02 * said


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no room left on the disk: about 3.0 MiB wanted, "),
        (SafetensorError("I/O error: full (os error 28)"), "no room left on the disk: "),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "access denied: [Errno 13] Permission denied: 'x'"),
        (OSError(errno.ESTALE, "Stale file handle"), "the disk fails: "),
        (FileNotFoundError(2, "gone"), None),
        (RuntimeError("28"), None),
    ],
)
def test_a_full_or_forbidden_disk_is_explained(tmp_path, error, what):
    explained = explain_os_error(error, where="stage=scan", folder=tmp_path / "new", expected=3 * 2**20)
    if what is None:
        assert explained is None
    else:
        assert explained.what.startswith(what)
        assert explained.where.startswith(f"stage=scan, {tmp_path}/new")
        assert ("mounted" if "fails" in what else "output_dir=") in explained.do
