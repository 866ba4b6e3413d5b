"""Tensors that plain hooks and autograd see in a transformers model; a dump must equal them bit for bit."""

import sys
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

ATTENTION = ("query", "key", "value")


def eager(module, *args, **kwargs):
    """The architecture's own eager attention."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


KERNELS = {"eager": eager, "sdpa": sdpa_attention_forward}


@contextmanager
def registered(name, kernel, like):
    """Register an attention kernel under `name`, with the masks of the implementation `like`."""
    AttentionInterface.register(name, kernel)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[like])
    try:
        yield
    finally:
        del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]


def run_plainly(model, passes, kernel="sdpa"):
    """Run forward and backward passes; return {(pass, module, tensor): value} and the losses."""
    found, kept, losses, number = {}, [], [], 0
    names = {module: name for name, module in model.named_modules()}

    def keep(number, module, tensor_name, tensor):
        found[number, names[module], tensor_name] = tensor.detach().clone()
        if tensor.requires_grad:
            tensor.retain_grad()
            gradient = "grad_output" if tensor_name == "output" else f"grad_{tensor_name}"
            kept.append((number, names[module], gradient, tensor))

    def spy(module, query, key, value, *args, **kwargs):
        for name, tensor in zip(ATTENTION, (query, key, value), strict=True):
            keep(number, module, name, tensor)
        return KERNELS[kernel](module, query, key, value, *args, **kwargs)

    def on_linear(module, args, output):
        found[number, names[module], "input"] = args[0].detach().clone()
        found[number, names[module], "weight"] = module.weight.detach().clone()
        keep(number, module, "output", output)

    model.config._attn_implementation = "spy"
    handles = [
        module.register_forward_hook(on_linear) for module in names if isinstance(module, nn.Linear | nn.Embedding)
    ]
    with registered("spy", spy, kernel):
        for number, inputs in enumerate(passes):  # noqa: B007 - which pass it is, for the hooks
            loss = model(**inputs).loss
            loss.backward()
            losses.append(loss.detach())
    for handle in handles:
        handle.remove()
    found |= {(number, module, name): tensor.grad.clone() for number, module, name, tensor in kept}
    return {key: value for key, value in found.items() if key[2] != "output"}, torch.stack(losses)
