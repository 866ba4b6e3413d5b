"""A dump of a transformers model with its own tensor-parallel plan, in two processes over gloo."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from integration.forked import run_ranks
from numerics.plain_hooks import run_plainly
from pico import write_pico
from transformers import AutoModelForCausalLM

from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.tensor_dump import TensorDump

IDS = torch.arange(14).view(2, 7)


def run(folder, rank):
    """Run the model with its own `tp_plan`, in one of two processes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on how to pass the plan from transformers 5.18 on
        model = AutoModelForCausalLM.from_pretrained(folder / "pico", dtype=torch.float32, tp_plan="auto").train()
    with TensorDump(model, folder / "dump", environment={}) as dumped:
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        dumped.step(loss)
    torch.save(loss.detach(), folder / f"loss-{rank}.pt")
    assert list(dumped.manifest.complaints()) == []
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    write_pico(folder / "pico", "qwen3", vocab=62, intermediate=36)
    run_ranks(2, lambda rank: run(folder, rank))
    return folder


def test_weights_are_the_parts_of_one_process(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "pico", dtype=torch.float32).train()
    expected, losses = run_plainly(model, [{"input_ids": IDS, "labels": IDS}])
    loss = torch.load(folder / "loss-0.pt", weights_only=True)  # noqa: TID251 - a file this test wrote
    torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=0)
    with DumpReader(folder / "dump") as reader:
        weights = reader.select(rank=0, tensor="weight")
        assert {record.source.module for record in weights} == {name for _, name, kind in expected if kind == "weight"}
        for record in weights:
            (other,) = reader.select(rank=1, tensor="weight", module=record.source.module)
            whole = expected[0, record.source.module, "weight"]
            axis = next((axis for axis in (0, 1) if record.shape[axis] < whole.shape[axis]), None)
            parts = [reader.load(one) for one in (record, other)]
            assert torch.equal(parts[0] if axis is None else torch.cat(parts, axis), whole)


def test_each_process_holds_its_own_part(folder):
    with DumpReader(folder / "dump") as reader:
        for rank in range(2):
            mine = {(r.source.module.rpartition(".")[2], r.source.tensor): r for r in reader.select(rank=rank, layer=1)}
            assert mine["down_proj", "input"].parallel == {"tp": (rank, 2)}
            assert mine["down_proj", "input"].shape == (2, 7, 18)
            assert mine["self_attn", "key"].shape == (2, 1, 7, 8)
