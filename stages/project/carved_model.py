"""The carved model with a gradient: the dense model of transformers, its FFNs replaced by experts behind a router."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from models.experts import ExpertLoop, ExpertWeights
from models.loading import input_device
from stages.losses import prediction_distance
from stages.text.sequences import TokenBatch


@dataclass(frozen=True)
class TaughtBatch:
    """Tokens, and the dense model's last hidden states for them."""

    tokens: TokenBatch
    hidden_BTD: Float[Tensor, "B T D"]


class _CarvedFFN(nn.Module):
    """A layer's experts in the place of its FFN."""

    def __init__(self, loop: ExpertLoop) -> None:
        super().__init__()
        self.loop = loop
        self.clips = False

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_TD = x_BTD.flatten(0, -2).float()
        if torch.is_grad_enabled():
            output_TD = self.loop.differentiable(x_TD)
            if self.clips and output_TD.requires_grad:
                output_TD.register_hook(clip_tokens)  # type: ignore[no-untyped-call]
        else:
            output_TD = self.loop(x_TD)
        return output_TD.view(x_BTD.shape).to(x_BTD.dtype)


def clip_tokens(gradient_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
    """Scale every token's gradient down to the median norm.

    A few tokens (those that attention gathers at) have gradients ten times as large, of a sign that changes from text
    to text: unclipped, they decide the direction of a mean over thousands.
    """
    norms_T1 = gradient_TD.norm(dim=1, keepdim=True)
    scale_T1: Tensor = (norms_T1.median() / norms_T1.clamp_min(torch.finfo(norms_T1.dtype).tiny)).clamp_max(1)
    return gradient_TD * scale_T1


class _GivenHidden(nn.Module):
    """Stands in for the decoder: its last hidden states are known."""

    def forward(self, inputs_embeds: Tensor, **_arguments: object) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


class CarvedModel:
    """Attention, norms, embeddings and head by transformers' own code; every FFN by an `ExpertLoop`.

    The loops route as the emitted checkpoint does, and the loss is the distance of its predictions from the dense
    model's. Weights that several layers share (a pool's) are one tensor, with one gradient.

    Memory: the dense model, the experts in fp32, and one gradient for each of their numbers.
    """

    def __init__(self, dense: PreTrainedModel, loops: Sequence[ExpertLoop | None]) -> None:
        """Take over a frozen dense model; `loops` are of its layers in order, None of one that stays dense."""
        self.model = dense
        carved = [(layer, loop) for layer, loop in zip(dense.get_decoder().layers, loops, strict=True) if loop]
        self._layers = [layer for layer, _ in carved]
        self._dense = [layer.mlp for layer in self._layers]
        self._carved = [_CarvedFFN(loop) for _, loop in carved]

    @property
    def loops(self) -> list[ExpertLoop]:
        """The carved layers as they are, those that stay dense left out."""
        return [module.loop for module in self._carved]

    def weights(self, names: Sequence[str]) -> list[tuple[str, Tensor]]:
        """Field and tensor of every weight in those fields of `ExpertWeights`, shared ones once; none is empty."""
        tensors = ((name, getattr(loop.experts, name)) for loop in self.loops for name in names)
        return list({id(tensor): (name, tensor) for name, tensor in tensors if tensor.numel()}.values())

    def put(self, names: Sequence[str], new: Sequence[Tensor]) -> None:
        """Replace what `weights` gives for the same names, in every layer that holds it."""
        by_identity = {id(old): tensor for (_, old), tensor in zip(self.weights(names), new, strict=True)}
        for module in self._carved:
            held = vars(module.loop.experts).items()
            experts = ExpertWeights(**{name: by_identity.get(id(tensor), tensor) for name, tensor in held})
            module.loop = replace(module.loop, experts=experts)

    @torch.no_grad()
    def teach(self, batches: Sequence[TokenBatch]) -> list[TaughtBatch]:
        """What the dense model makes of some batches. Memory: D numbers a token."""
        return [TaughtBatch(batch, self._last_hidden(batch)) for batch in batches]

    @torch.no_grad()
    def divergence(self, batches: Sequence[TaughtBatch]) -> float:
        """Mean KL(dense ‖ carved) of the next-token distributions, nats per token."""
        with self._as_carved():
            total = sum(float(self._distance(batch)) for batch in batches)
        return total / count_tokens(batches)

    def gradients(self, batches: Sequence[TaughtBatch], names: Sequence[str], *, clipped: bool = False) -> list[Tensor]:
        """∂(mean KL) / ∂W in the order of `weights`, through the routing as it is emitted.

        Args:
            batches: tokens and the dense model's hidden states.
            names: fields of `ExpertWeights`.
            clipped: no token's gradient at an FFN's output is larger than the batch's median (see `clip_tokens`).
        """
        for module in self._carved:
            module.clips = clipped
        originals = [tensor for _, tensor in self.weights(names)]
        leaves = [tensor.detach().requires_grad_() for tensor in originals]
        self.put(names, leaves)
        try:
            with self._as_carved(), torch.enable_grad():
                for batch in batches:
                    (self._distance(batch) / count_tokens(batches)).backward()  # type: ignore[no-untyped-call]
        finally:
            self.put(names, originals)
        # A pool's expert that no layer sends a token to has none.
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    def _distance(self, batch: TaughtBatch) -> Tensor:
        tokens, device = batch.tokens, input_device(self.model)
        mask_BT = tokens.attention_mask.to(device)
        logits = self.model(input_ids=tokens.input_ids.to(device), attention_mask=mask_BT, use_cache=False).logits
        with torch.no_grad():
            wanted = self._logits(batch.hidden_BTD)
        return prediction_distance(logits, wanted.to(logits.device), mask_BT.bool().to(logits.device))

    def _last_hidden(self, batch: TokenBatch) -> Tensor:
        device = input_device(self.model)
        hidden_BTD: Tensor = self.model.base_model(
            input_ids=batch.input_ids.to(device), attention_mask=batch.attention_mask.to(device), use_cache=False
        ).last_hidden_state
        return hidden_BTD

    def _logits(self, hidden_BTD: Tensor) -> Tensor:
        """By the model's own head, which may scale or cap them."""
        prefix, decoder = self.model.base_model_prefix, self.model.base_model
        setattr(self.model, prefix, _GivenHidden())
        try:
            logits: Tensor = self.model(inputs_embeds=hidden_BTD, use_cache=False).logits
        finally:
            setattr(self.model, prefix, decoder)
        return logits

    @contextmanager
    def _as_carved(self) -> Iterator[None]:
        self._put(self._carved)
        try:
            yield
        finally:
            self._put(self._dense)

    def _put(self, ffns: Sequence[nn.Module]) -> None:
        for layer, ffn in zip(self._layers, ffns, strict=True):
            layer.mlp = ffn


def count_tokens(batches: Sequence[TaughtBatch]) -> int:
    """Tokens, padding left out."""
    return sum(batch.tokens.tokens for batch in batches)
