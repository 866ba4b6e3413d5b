"""Training with Megatron's schedule; one import alone enables the dump: python megatron_loop.py STORE."""

import sys
from pathlib import Path
from unittest.mock import patch

import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron_on_cpu import make_batches, make_gpt, megatron_group
from megatron_sizes import B, T
from torch import nn

import instruments.tensor_dump.auto  # noqa: F401 - the one line


class Float16Module(nn.Module):
    """A wrapper like those that Megatron puts around a model."""

    def __init__(self, module):
        super().__init__()
        self.module, self.config = module, module.config

    def forward(self, **arguments):
        return self.module(**arguments)

    def set_input_tensor(self, tensor):
        return self.module.set_input_tensor(tensor)


def forward_step(batches, model):
    return model(**next(batches)), lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def zeros(*sizes, device=None, **settings):
    """Ignore `device`: Megatron's schedule allocates its token count on a GPU."""
    return ZEROS(*sizes, **settings)


ZEROS = torch.zeros


def main(store):
    with megatron_group(store=store), patch.object(torch, "zeros", zeros):
        model, losses = Float16Module(make_gpt()), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            found = get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iter(make_batches()), model=[model],
                num_microbatches=2, seq_length=T, micro_batch_size=B, forward_only=False,
            )  # fmt: skip
            losses += [one["loss"].item() for one in found]
            optimizer.step()
    sys.stdout.write(f"{losses}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
