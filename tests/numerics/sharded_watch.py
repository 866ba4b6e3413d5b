"""The monitor in two processes, each with half of every parameter, reports what it reports in one process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from instruments.training_watch.model_watch import watch_model


def report_of(model):
    """Report of one step; all processes have the same batch."""
    with watch_model(model) as watch:
        loss = model(torch.randn(7, 6, generator=torch.Generator().manual_seed(1))).square().mean()
        loss.backward()
        return watch.step(loss=loss)


def follow(model, wrapped, rank, log=None):
    """Train without `watch.step`; batches differ between processes, so the norm is that of the mean gradient."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with watch_model(model, optimizer, log=log) as watch:
        for step in range(2):
            x = torch.randn(7, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            wrapped(x).square().mean().backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            assert abs(watch.last.gradient_norm - norm) < 1e-5 * norm, (watch.last.gradient_norm, norm)
            optimizer.zero_grad()


def main(rank, port, log):
    """Compare the reports of the whole and of the sharded model, in one of two processes; both write a log."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    whole = report_of(model)
    model.zero_grad()
    follow(model, nn.parallel.DistributedDataParallel(model), rank, log)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    shards = report_of(model)
    assert shards.layers.keys() == whole.layers.keys()
    for name, norm in whole.layers.items():
        assert abs(shards.layers[name] - norm) < 1e-5 * norm, (name, shards.layers[name], norm)
    follow(model, model, rank)
    dist.destroy_process_group()
