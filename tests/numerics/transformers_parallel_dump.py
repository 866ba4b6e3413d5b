"""One of two processes that run a model with its own `tp_plan`."""

import os
import warnings

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from instruments.tensor_dump.tensor_dump import TensorDump

IDS = torch.arange(14).view(2, 7)


def run(folder, rank):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on how to pass the plan from transformers 5.18 on
        model = AutoModelForCausalLM.from_pretrained(folder / "pico", dtype=torch.float32, tp_plan="auto").train()
    with TensorDump(model, folder / "dump", environment={}) as dumped:
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        dumped.step(loss)
    gradients = {
        name: getattr(parameter.grad, "to_local", lambda grad=parameter.grad: grad)()
        for name, parameter in model.named_parameters()
    }
    torch.save({"loss": loss.detach(), "gradients": gradients}, folder / f"run-{rank}.pt")
    assert list(dumped.manifest.complaints()) == []
    dist.destroy_process_group()
