"""The carved model for autograd: the dense model of transformers with experts behind a router as FFNs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from instruments.device import rounded_products
from models.experts import ExpertLoop, ExpertWeights
from models.ffn import replaced_ffns
from models.loading import input_device
from models.structure import decoder_layers, ffn_plan
from stages.artifacts.job import ALONE, Workers
from stages.losses import prediction_distance
from stages.text.batches import TokenBatch


@dataclass(frozen=True)
class TaughtBatch:
    """Tokens, and the dense model's last hidden states for them."""

    tokens: TokenBatch
    hidden_BTD: Float[Tensor, "B T D"]


class _SumOfParts(torch.autograd.Function):
    """Sum the parts of all workers; each gets the gradient of the sum. g of arXiv:1909.08053, section 3."""

    @staticmethod
    def forward(_ctx: Any, part_TD: Tensor, workers: Workers) -> Tensor:  # noqa: ANN401 - autograd's context
        total_TD = part_TD.clone()
        workers.sum_(total_TD)
        return total_TD

    @staticmethod
    def backward(_ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return grad_TD, None


class _SumOfGradients(torch.autograd.Function):
    """Pass on an input that all workers have; sum their gradients. f of arXiv:1909.08053, section 3."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, workers: Workers) -> Tensor:  # noqa: ANN401 - autograd's context
        ctx.workers = workers
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        total_TD = grad_TD.clone(memory_format=torch.contiguous_format)
        ctx.workers.sum_(total_TD)
        return total_TD, None


class _CarvedFFN(nn.Module):
    """A layer's experts as its FFN; each of several workers holds some of them."""

    def __init__(self, loop: ExpertLoop, workers: Workers) -> None:
        super().__init__()
        self.loop, self.workers = loop, workers

    def forward(self, x_BTD: Tensor, *_args: object, **_arguments: object) -> Tensor:
        x_TD = x_BTD.flatten(0, -2).to(self.loop.router.rows_ED)  # a pool is on one device, the layers on several
        shared = self.workers.world > 1
        if torch.is_grad_enabled():
            x_TD = _SumOfGradients.apply(x_TD, self.workers) if shared else x_TD  # type: ignore[no-untyped-call]
            output_TD = self.loop.differentiable(x_TD)
            if shared and not output_TD.requires_grad:  # no experts here, but backward needs all workers
                output_TD.requires_grad_()
        else:
            output_TD = self.loop(x_TD)
        output_TD = _SumOfParts.apply(output_TD, self.workers) if shared else output_TD  # type: ignore[no-untyped-call]
        if output_TD.requires_grad:
            output_TD.register_hook(clip_tokens)
        return output_TD.view(x_BTD.shape).to(x_BTD)


def clip_tokens(gradient_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
    """Scale gradients of tokens above the median norm down to it; padding, whose gradient is 0, does not count.

    A few tokens (attention sinks) have ten times larger gradients, whose sign changes from text to text. Without
    clipping they determine the direction of a mean over thousands of tokens.
    """
    norms_T1 = gradient_TD.norm(dim=1, keepdim=True)
    median = norms_T1.masked_fill(norms_T1 == 0, torch.nan).nanmedian().nan_to_num()
    scale_T1: Tensor = (median / norms_T1.clamp_min(torch.finfo(norms_T1.dtype).tiny)).clamp_max(1)
    return gradient_TD * scale_T1


@contextmanager
def _answering(decoder: nn.Module, output: ModelOutput) -> Iterator[None]:
    """Let the decoder return `output` without running; its class, attributes and arguments stay."""
    forward = vars(decoder).get("forward")  # of accelerate, if it is offloaded
    decoder.forward = lambda *_args, **_arguments: output
    try:
        yield
    finally:
        del decoder.forward
        if forward is not None:
            decoder.forward = forward


# Gradients of a mean over tokens vanish in float16 below 6e-8. A power of two costs no accuracy.
HALF_LOSS_SCALE = 2.0**9


class CarvedModel:
    """Attention, norms, embeddings and head are transformers' own code; every carved FFN is an `ExpertLoop`.

    The loops route like the emitted checkpoint, and the loss is the KL of its predictions to the dense model's.
    Weights that layers share (in a pool) are one tensor with one gradient.

    Several workers run the same batches, each with its own experts, and sum the outputs of every FFN. Each worker
    computes the whole gradient of its experts; all compute attention and head.
    Memory: the dense model and this worker's experts in fp32.
    """

    def __init__(self, dense: PreTrainedModel, loops: Sequence[ExpertLoop | None], workers: Workers = ALONE) -> None:
        """Wrap a frozen dense model; `loops` has one entry per layer, None for a layer that stays dense.

        With several workers, each passes the `ExpertLoop.part` of its rank.
        """
        self.model, self._workers = dense, workers
        carved = [(layer, loop) for layer, loop in zip(decoder_layers(dense)[1], loops, strict=True) if loop]
        self._layers = [layer for layer, _ in carved]
        self._path = ffn_plan(dense).path
        self._carved = [_CarvedFFN(loop, workers) for _, loop in carved]

    @property
    def device(self) -> torch.device:
        """Where the model reads its tokens."""
        return input_device(self.model)

    @property
    def loops(self) -> list[ExpertLoop]:
        """The carved layers, or this worker's parts of them, without the layers that stay dense."""
        return [module.loop for module in self._carved]

    def root_mean_squares(self) -> list[float]:
        """Root-mean-square norm of the neurons in each weight of `weights`, in its order; over all workers."""
        held = [pair for loop in self.loops for pair in vars(loop.experts).items()]
        table_W2 = torch.zeros(len(held), 2, dtype=torch.float64)
        for place, (name, tensor) in enumerate(held):
            norms = tensor.double().norm(dim=neuron_dim(name))
            table_W2[place] = torch.stack([norms.square().sum(), norms.new_tensor(norms.numel())])
        self._workers.sum_(table_W2)
        scales = (table_W2[:, 0] / table_W2[:, 1].clamp_min(1)).sqrt().tolist()
        by_identity = {id(tensor): scale for (_, tensor), scale in zip(held, scales, strict=True)}
        return [by_identity[id(tensor)] for _, tensor in self.weights()]

    def weights(self) -> list[tuple[str, Tensor]]:
        """(field, tensor) of every non-empty weight of the experts; tensors that layers share once."""
        tensors = (pair for loop in self.loops for pair in vars(loop.experts).items())
        return list({id(tensor): (name, tensor) for name, tensor in tensors if tensor.numel()}.values())

    @torch.no_grad()
    def teach(self, batches: Sequence[TokenBatch]) -> list[TaughtBatch]:
        """The dense model's last hidden states; workers share the batches. Memory: D numbers per token."""
        rank, world = self._workers.rank, self._workers.world
        if world == 1:
            return [TaughtBatch(batch, self._last_hidden(batch)) for batch in batches]
        sizes, like_VD = [batch.input_ids.numel() for batch in batches], self.model.get_input_embeddings().weight
        rows_PD = like_VD.new_zeros(sum(sizes), like_VD.shape[1])
        hidden = [
            rows_TD.view(*batch.input_ids.shape, like_VD.shape[1])
            for rows_TD, batch in zip(torch.split(rows_PD, sizes), batches, strict=True)
        ]
        for batch, hidden_BTD in list(zip(batches, hidden, strict=True))[rank::world]:
            hidden_BTD.copy_(self._last_hidden(batch))
        self._workers.sum_(rows_PD)
        return [TaughtBatch(batch, hidden_BTD) for batch, hidden_BTD in zip(batches, hidden, strict=True)]

    @torch.no_grad()
    def divergence(self, batches: Sequence[TaughtBatch]) -> float:
        """Mean KL(dense ‖ carved) of the next-token distributions, nats per token; equal at every worker."""
        with self._as_carved():
            total = float(sum(self._distance(batch).double() for batch in batches))  # one wait for a GPU
        return float(self._workers.broadcast(total / count_tokens(batches)))

    def backward(self, batch: TaughtBatch, weights: Sequence[Tensor], receive: Callable[[int, Tensor], None]) -> None:
        """Pass ∂(mean KL) / ∂W of each of these `weights` to `receive`, with its index, as soon as it is complete.

        The gradient goes through the emitted routing; `clip_tokens` is applied to that of every FFN's output.
        `receive` may change the weight: backward has no more use for it.
        """
        missing = set(range(len(weights)))
        half = self.model.get_input_embeddings().weight.dtype == torch.float16

        def pass_on(index: int, weight: Tensor) -> None:
            missing.discard(index)
            gradient, weight.grad = weight.grad, None
            assert gradient is not None, "called behind its accumulation"
            receive(index, gradient.div_(HALF_LOSS_SCALE) if half else gradient)

        hooks = [
            weight.requires_grad_().register_post_accumulate_grad_hook(partial(pass_on, index))  # type: ignore[no-untyped-call]
            for index, weight in enumerate(weights)
        ]
        try:
            with self._as_carved(), torch.enable_grad():
                distance = self._distance(batch) / count_tokens([batch])  # small, so rounded logits would hide it
                distance = distance * HALF_LOSS_SCALE if half else distance
                # Layers that are recomputed, see `save_memory`, must choose the same experts again.
                recomputed = any(layer.training for layer in self._layers)
                with nullcontext() if recomputed else rounded_products(on=["cpu"]):
                    distance.backward()  # type: ignore[no-untyped-call]
        finally:
            for hook, weight in zip(hooks, weights, strict=True):
                hook.remove()
                weight.requires_grad = False
        for index in sorted(missing):  # no token of the batch reaches it
            receive(index, torch.zeros_like(weights[index]))

    def _distance(self, batch: TaughtBatch) -> Tensor:
        inputs, outputs = batch.tokens.inputs(self.device), []
        with self.model.base_model.register_forward_hook(lambda _module, _args, output: outputs.append(output)):
            logits = self.model(**inputs, use_cache=False).logits
        mask_BT = inputs["attention_mask"].to(logits.device) > 0
        # The model's own head may scale or cap logits, and reads other fields of the decoder's output.
        taught = copy(outputs[-1])
        taught["last_hidden_state"] = batch.hidden_BTD
        with torch.no_grad(), _answering(self.model.base_model, taught):
            wanted = self.model(**inputs, use_cache=False).logits
        return prediction_distance(logits, wanted.to(logits.device), mask_BT)

    def _last_hidden(self, batch: TokenBatch) -> Tensor:
        inputs = batch.inputs(self.device)
        hidden_BTD: Tensor = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        return hidden_BTD

    def _as_carved(self) -> AbstractContextManager[None]:
        return replaced_ffns(self._layers, self._path, self._carved)


def gather_parts(loops: Sequence[ExpertLoop], workers: Workers) -> list[ExpertLoop]:
    """Join the workers' parts in the leading worker's host memory; layers of a pool still share its weights.

    One tensor at a time is whole on the device, which has no room for all layers. The other workers keep their parts.
    """
    if workers.world == 1:
        return list(loops)
    joined: dict[int, Tensor] = {}
    return [_gather_part(loop, workers, joined) for loop in loops]


def _gather_part(loop: ExpertLoop, workers: Workers, joined: dict[int, Tensor]) -> ExpertLoop:
    """`joined`: identity of a part → the whole, of earlier layers."""
    counts = workers.gather((len(loop.neurons_EN), len(loop.always_S)))
    experts, always = (sum(each) for each in zip(*counts, strict=True))
    whole: dict[str, Tensor] = {}
    held = vars(loop.experts) | {"neurons": loop.neurons_EN, "always": loop.always_S}
    for name, part in held.items():
        if id(part) in joined:
            whole[name] = joined[id(part)]
            continue
        dim = 1 if name == "shared_down_DS" else 0
        size = list(part.shape)
        size[dim] = always if name.startswith(("shared", "always")) else experts
        gathered = part.new_zeros(size)
        gathered[(slice(None),) * dim + (loop.held,)] = part
        workers.reduce_(gathered)
        whole[name] = joined[id(part)] = gathered.cpu() if workers.leads else part
    neurons_EN, always_S = whole.pop("neurons"), whole.pop("always")
    return replace(loop, experts=ExpertWeights(**whole), neurons_EN=neurons_EN, always_S=always_S, held=slice(None))


def neuron_dim(field: str) -> int:
    """Dimension of this field of `ExpertWeights` that holds one neuron's weights."""
    return -2 if "down" in field else -1


def count_tokens(batches: Sequence[TaughtBatch]) -> int:
    """Number of tokens without padding."""
    return sum(batch.tokens.tokens for batch in batches)
