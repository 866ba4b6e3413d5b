"""One process of a Megatron run with a tensor dump."""

import torch
from megatron_on_cpu import make_batches, make_gpt, megatron_group

from instruments.tensor_dump.config import DumpConfig
from instruments.tensor_dump.tensor_dump import TensorDump

CASES = {
    "plain": {},
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def run(folder, rank, world, case):
    with megatron_group(rank, world, folder / "store"):
        model, losses = make_gpt(world, **CASES[case]), []
        with TensorDump(model, folder / "dump", DumpConfig()) as dumped:
            for batch in make_batches():
                loss = model(**batch).mean()
                loss.backward()
                losses.append(loss.detach())
                dumped.step(loss)
        complaints = list(dumped.manifest.complaints())
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert complaints == [], complaints
    torch.save({"losses": torch.stack(losses), "gradients": gradients}, folder / f"run-{rank}.pt")
