"""Language-model losses, the teacher-forced forward pass, and the distance between two models' predictions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.functional import kl_div, log_softmax
from tqdm import tqdm
from transformers import PreTrainedModel

from instruments.device import free_device_memory, is_launch_bound
from instruments.errors import ConfigError
from models.device import send
from models.loading import input_device, is_offloaded
from models.structure import decoder_layers
from stages.artifacts.job import ALONE, Workers
from stages.text.batches import IGNORED, TokenBatch

# Logits per softmax chunk, 4 MiB in fp32, which a cache holds; on a GPU up to 256 MiB, so that there are few chunks.
CHUNK_VALUES, GPU_CHUNK_VALUES = 2**20, 2**26
CHUNK_BYTES = 12  # for each of them at the same time


def cross_entropy(
    logits_NV: Float[Tensor, "N V"], targets_N: Int[Tensor, "N"], *, inplace_backward: bool = False
) -> Float[Tensor, "N"]:
    """−log p(target) in nats, fp32; 0 where the target is ignored (-100).

    PyTorch's cross-entropy holds three tensors of the logits' size in the backward pass, most of a batch's memory. This
    one holds two. With `inplace_backward` it holds one: the gradient overwrites the logits, so nothing may read them
    afterwards. Autograd raises an error if another backward operation needs them.
    """
    losses_N: Tensor = _CrossEntropy.apply(logits_NV, targets_N, inplace_backward)  # type: ignore[no-untyped-call]
    return losses_N


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, inplace_backward: bool) -> Tensor:  # noqa: ANN401 - autograd's context
        ctx.save_for_backward(logits_NV, targets_N)
        ctx.inplace_backward = inplace_backward
        losses = [
            functional.cross_entropy(logits_NV[rows].float(), targets_N[rows], ignore_index=IGNORED, reduction="none")
            for rows in _chunks(logits_NV)
        ]
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 - autograd's context
        logits_NV, targets_N = ctx.saved_tensors
        grad_NV = logits_NV if ctx.inplace_backward else torch.empty_like(logits_NV)
        counts_N = targets_N != IGNORED
        grad_N1, targets_N1 = (grad_N * counts_N)[:, None], (targets_N * counts_N)[:, None]
        for rows in _chunks(logits_NV):
            # d loss / d logit = p − 1[target].
            change_nV = logits_NV[rows].float().softmax(-1)
            change_nV.scatter_add_(1, targets_N1[rows], change_nV.new_full((len(change_nV), 1), -1))
            grad_NV[rows] = change_nV.mul_(grad_N1[rows])
        return grad_NV, None, None


def _chunks(logits_NV: Tensor) -> Iterator[slice]:
    tokens, vocabulary = logits_NV.shape
    free = free_device_memory(logits_NV.device)
    values = CHUNK_VALUES if free is None else min(GPU_CHUNK_VALUES, max(CHUNK_VALUES, free // 2 // CHUNK_BYTES))
    step = max(1, values // vocabulary)
    return (slice(start, start + step) for start in range(0, tokens, step))


def next_labels(labels_BT: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """What each position predicts: the label behind it; ignored at the end."""
    return functional.pad(labels_BT[:, 1:], (0, 1), value=IGNORED)


def token_losses(
    logits_BTV: Float[Tensor, "B T V"], labels_BT: Int[Tensor, "B T"], *, inplace_backward: bool = False
) -> Float[Tensor, "B T-1"]:
    """Cross-entropy in nats of each next token, 0 where the label is ignored (-100); fp32; see `cross_entropy`.

    Shifts the labels instead of the logits: slicing the logits would copy them and pad their gradient.
    """
    targets_BT = next_labels(labels_BT)
    losses_N = cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), inplace_backward=inplace_backward)
    return losses_N.view(targets_BT.shape)[:, :-1]


def supervised_tokens(labels_BT: Int[Tensor, "B T"]) -> Int[Tensor, "B"]:
    """Number of next tokens of each sample that count in its loss."""
    return (labels_BT[:, 1:] != IGNORED).sum(1)


def predicts(labels_BT: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Positions whose next token counts in the loss."""
    return next_labels(labels_BT) != IGNORED


@dataclass(frozen=True)
class MeanLoss:
    """Next-token loss over all supervised tokens of a text."""

    total: float  # nats
    tokens: int
    divergence: float | None = None  # mean KL(dense ‖ model) per token, nats; None: not measured
    agreement: float | None = None  # share of tokens where both models find the same token most likely
    sequences: Sequence[tuple[float, int]] = ()  # loss and tokens of each

    @property
    def nats(self) -> float:
        """Mean per token."""
        return self.total / self.tokens

    def gap_error(self, dense: "MeanLoss") -> float | None:
        """Standard error of the gap, over sequences that both models read; None for fewer than two.

        The gap is a ratio of two sums over sequences, Σ gap_s / Σ tokens_s; this is the error of its linearisation.
        """
        count, gap = len(self.sequences), self.nats - dense.nats
        if count < 2:
            return None
        pairs = zip(self.sequences, dense.sequences, strict=True)
        rests = (ours - theirs - gap * tokens for (ours, tokens), (theirs, _) in pairs)
        return math.sqrt(sum(rest * rest for rest in rests) * count / (count - 1)) / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(nats); the exponent is at most 700, below float64's overflow."""
        return math.exp(min(self.nats, 700.0))


def prediction_distance(
    student_BTV: Float[Tensor, "B T V"], teacher_BTV: Float[Tensor, "B T V"], counts_BT: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Σ KL(teacher ‖ student) of the next-token distributions.

    Memory: both tensors of logits. The gradient overwrites the teacher's if both have the same dtype, so nothing may
    read them after the backward pass; else it is a third tensor.
    Source: Hinton et al., arXiv:1503.02531, section 2, at temperature 1.
    """
    student_NV, teacher_NV = student_BTV.flatten(0, 1), teacher_BTV.detach().flatten(0, 1)
    total: Tensor = _Divergence.apply(student_NV, teacher_NV, counts_BT.flatten())  # type: ignore[no-untyped-call]
    return total


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student_NV: Tensor, teacher_NV: Tensor, counts_N: Tensor) -> Tensor:  # noqa: ANN401 - autograd's context
        ctx.save_for_backward(student_NV, teacher_NV, counts_N)
        total = student_NV.new_zeros((), dtype=torch.float32)
        for rows in _chunks(student_NV):
            ours_nV, theirs_nV = (log_softmax(logits[rows].float(), -1) for logits in (student_NV, teacher_NV))
            distance_n = kl_div(ours_nV, theirs_nV, reduction="none", log_target=True).sum(-1)
            # A GPU's host would wait for the number of tokens.
            masked = is_launch_bound(distance_n.device)
            total += (distance_n.where(counts_N[rows], 0) if masked else distance_n[counts_N[rows]]).sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 - autograd's context
        student_NV, teacher_NV, counts_N = ctx.saved_tensors
        grad_NV = teacher_NV if teacher_NV.dtype == student_NV.dtype else torch.empty_like(student_NV)
        grad_N1 = (grad * counts_N)[:, None]
        for rows in _chunks(student_NV):
            # d KL / d student's logit = p(student) − p(teacher).
            change_nV = student_NV[rows].float().softmax(-1).sub_(teacher_NV[rows].float().softmax(-1))
            grad_NV[rows] = change_nV.mul_(grad_N1[rows])
        return grad_NV, None, None


def measure_loss(
    model: PreTrainedModel, batches: Sequence[TokenBatch], name: str | None = None, workers: Workers = ALONE
) -> MeanLoss:
    """Next-token loss over all supervised tokens. Workers share the batches; no progress bar without a `name`."""
    return measure_losses({name or "": model}, batches, workers)[name or ""]


@torch.no_grad()
def measure_losses(
    models: Mapping[str, PreTrainedModel], batches: Sequence[TokenBatch], workers: Workers = ALONE
) -> dict[str, MeanLoss]:
    """The same of several models in one pass; with KL(first model ‖ model), if there are more.

    Without a progress bar if a model has no name. Memory: every model's logits of one batch.
    """
    found: dict[str, dict[int, Tensor]] = {name: {} for name in models}
    mine, title = range(len(batches))[workers.rank :: workers.world], f"loss of the {' and '.join(models)} model"
    for number in tqdm(mine, desc=title, unit="batch", disable=not (all(models) and workers.leads)):
        batch, first_BTV = batches[number], None
        for name, model in models.items():
            logits_BTV = model(**batch.inputs(input_device(model)), use_cache=False).logits
            labels_BT = send(batch.labels, logits_BTV.device, torch.int64)
            found[name][number] = sum_losses(logits_BTV, labels_BT, first_BTV)
            if len(models) > 1 and first_BTV is None:
                first_BTV = logits_BTV
        del logits_BTV, first_BTV  # before the next batch
    return {name: mean_loss(sums, batches, workers) for name, sums in found.items()}


@torch.no_grad()
def sum_losses(
    logits_BTV: Float[Tensor, "B T V"], labels_BT: Int[Tensor, "B T"], dense_BTV: Float[Tensor, "B T V"] | None = None
) -> Float[Tensor, "B+3"]:
    """Loss, KL(dense ‖ model) and tokens of equal choice of a batch, then every sequence's loss; sums, nats, fp64.

    One softmax of each model's logits serves all of them.
    """
    logits_NV = logits_BTV.flatten(0, 1)
    dense_NV = None if dense_BTV is None else dense_BTV.to(logits_BTV.device).flatten(0, 1)
    targets_N = next_labels(labels_BT).flatten()
    found_N3 = logits_BTV.new_full((len(targets_N), 3), math.nan, dtype=torch.float64)
    for rows in _chunks(logits_NV):
        ours_nV = log_softmax(logits_NV[rows].float(), -1)
        found_N3[rows, 0] = functional.nll_loss(ours_nV, targets_N[rows], ignore_index=IGNORED, reduction="none")
        if dense_NV is not None:
            theirs_nV = log_softmax(dense_NV[rows].float(), -1)
            found_N3[rows, 1] = kl_div(ours_nV, theirs_nV, reduction="none", log_target=True).sum(-1)
            found_N3[rows, 2] = (logits_NV[rows].argmax(-1) == dense_NV[rows].argmax(-1)).to(found_N3)
    found_N3.masked_fill_((targets_N == IGNORED)[:, None], 0)
    return torch.cat([found_N3.sum(0), found_N3[:, 0].view(labels_BT.shape).sum(1)])


def mean_loss(found: Mapping[int, Tensor], batches: Sequence[TokenBatch], workers: Workers = ALONE) -> MeanLoss:
    """The mean from the `sum_losses` of this worker's batches by number; every worker gets that of all batches."""
    counts = [supervised_tokens(batch.labels).tolist() for batch in batches]
    sums = torch.zeros(len(batches), 3 + max(map(len, counts)), dtype=torch.float64)
    for number, ours in found.items():
        sums[number, : len(ours)] = ours
    workers.sum_(sums)
    total, distance, equal = (float(column.contiguous().sum()) for column in sums.T[:3])
    losses = [row[3 : 3 + len(tokens)].tolist() for row, tokens in zip(sums, counts, strict=True)]
    sequences = [pair for batch in zip(losses, counts, strict=True) for pair in zip(*batch, strict=True)]
    tokens = sum(count for _, count in sequences)
    divergence, agreement = (None if math.isnan(each) else each / tokens for each in (distance, equal))
    return MeanLoss(total, tokens, divergence, agreement, tuple(sequences))


def forward_losses(model: nn.Module, batch: TokenBatch, *, inplace_backward_logits: bool = False) -> Float[Tensor, "B"]:
    """Each sample's mean loss over its supervised tokens, for a causal language model with frozen weights.

    With gradients enabled, only the output of the input embeddings requires a gradient: the graph reaches every layer,
    and no weight gets a gradient. `inplace_backward_logits` saves a third of the memory; no hook may keep the logits.
    """
    with gradients_from_embeddings(model):
        logits = model(**batch.inputs(input_device(model)), use_cache=False).logits
    labels_BT = send(batch.labels, logits.device, torch.int64)
    losses_BT = token_losses(logits, labels_BT, inplace_backward=inplace_backward_logits)
    return losses_BT.sum(1) / supervised_tokens(labels_BT)


@contextmanager
def gradients_from_embeddings(model: nn.Module) -> Iterator[None]:
    """Make the output of the input embeddings require a gradient: frozen weights alone would give no graph."""

    def require_grad(_module: nn.Module, _args: object, embedded_BTD: Tensor) -> Tensor:
        if embedded_BTD.requires_grad or not torch.is_grad_enabled():
            return embedded_BTD
        return embedded_BTD.detach().requires_grad_()

    with model.get_input_embeddings().register_forward_hook(require_grad):  # type: ignore[operator]
        yield


def save_memory(dense: PreTrainedModel, *, asked: bool) -> None:
    """Enable gradient checkpointing if `asked`, or if the model is offloaded.

    Without it, the graph keeps every offloaded weight on the device until the backward pass; with it, one layer's.
    """
    if asked or is_offloaded(dense):
        # Non-reentrant checkpointing of 8-bit layers would keep their inputs in memory.
        enable_gradient_checkpointing(dense, reentrant=getattr(dense, "is_loaded_in_8bit", False))


def enable_gradient_checkpointing(dense: PreTrainedModel, *, reentrant: bool = False) -> None:
    """Recompute layers in the backward pass, without the dropout that `train()` would enable."""
    # transformers 5 renamed it.
    enable = getattr(dense, "activation_checkpointing_enable", None) or dense.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": reentrant})
    except ValueError as error:
        what = f"transformers cannot recompute the layers of {type(dense).__name__}"
        where = "gradient_checkpointing of a stage, or a model.device_map that offloads"
        do = "model.device_map=none scan.gradient_checkpointing=false project.gradient_checkpointing=false"
        raise ConfigError(what, where=where, do=do) from error
    for layer in decoder_layers(dense)[1]:
        layer.training = True
