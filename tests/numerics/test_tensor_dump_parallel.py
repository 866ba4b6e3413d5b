"""A dump of a transformers model with its own tensor-parallel plan, in two processes over gloo."""

import pytest
import torch
from integration.forked import run_ranks
from numerics.plain_hooks import run_plainly
from numerics.transformers_parallel_dump import IDS, run
from pico import write_pico
from transformers import AutoModelForCausalLM

from instruments.tensor_dump.reader import DumpReader


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    write_pico(folder / "pico", "qwen3", vocab=62, intermediate=36)
    run_ranks(2, lambda rank: run(folder, rank))
    return folder


def test_joined_parts_are_what_one_process_computes(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "pico", dtype=torch.float32).train()
    expected, losses = run_plainly(model, [{"input_ids": IDS, "labels": IDS}])
    found = torch.load(folder / "run-0.pt", weights_only=True)  # noqa: TID251 - a file this test wrote
    torch.testing.assert_close(found["loss"], losses[0], rtol=1e-6, atol=0)
    with DumpReader(folder / "dump") as reader:
        mine = reader.select(rank=0)
        assert len(mine) == len(expected)
        for record in mine:
            joined = reader.join(record)
            whole = expected[0, record.source.module, record.source.tensor]
            torch.testing.assert_close(joined, whole, rtol=1e-4, atol=1e-6)
            if record.source.tensor == "weight":
                assert torch.equal(joined, whole)


def test_each_process_holds_its_own_part(folder):
    with DumpReader(folder / "dump") as reader:
        for rank in range(2):
            mine = {(r.source.module.rpartition(".")[2], r.source.tensor): r for r in reader.select(rank=rank, layer=1)}
            assert mine["down_proj", "input"].parallel == {"tp": (rank, 2)}
            assert (mine["down_proj", "input"].shape, mine["down_proj", "input"].placement.offset[-1]) == (
                (2, 7, 18),
                18 * rank,
            )
            assert (mine["self_attn", "key"].shape, mine["self_attn", "key"].placement.offset) == (
                (2, 1, 7, 8),
                (0, rank, 0, 0),
            )
            assert mine["up_proj", "input"].placement.global_shape == mine["up_proj", "input"].shape
