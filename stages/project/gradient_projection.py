"""Gradient projection: W_small = W_base + sign·β·α·λ·∇W / (‖∇W‖₂ + ε), for every neuron's own weights."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from instruments.device import prefers_large_products, rounded_products
from models.experts import ExpertLoop
from models.loading import load_dense
from stages.calibration.batches import CalibrationContext, layer_seed, text_sources
from stages.calibration.share import split_validation
from stages.losses import save_memory
from stages.project.carved_model import CarvedModel, TaughtBatch, gather_parts, neuron_dim
from stages.project.config import ProjectConfig
from stages.text.batches import TokenBatch, first_batches, split_batch

logger = logging.getLogger(__name__)


def project_neurons(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    lengths: Sequence[float],
    dims: Sequence[int],
    *,
    epsilon: float,
) -> None:
    """Move every neuron of these matrices, (…, P, Q) each, in place along its own normalised gradient.

    The norm is per neuron, so that neurons with few tokens move as far as others; with one norm per expert the loss
    fell less (conf/experiment/LOG.md). `lengths` are sign·β·α·λ, the L2 norm of each step, negative
    down the gradient. `epsilon` prevents large steps from vanishing gradients. `dims` are -1 if a neuron is a row
    (gate, up), -2 if it is a column (down).
    """
    norms = [gradient.norm(dim=dim, keepdim=True) for gradient, dim in zip(gradients, dims, strict=True)]
    # One call for all matrices: a GPU's host takes longer to start an operator than most of them take.
    torch._foreach_add_(norms, epsilon)
    torch._foreach_addcdiv_([*weights], [*gradients], norms, [*lengths])


MOMENTUM = 0.8  # of the gradient, from round to round
GRADIENT_BYTES = 2**28  # of gradients that wait for their step: few steps for a GPU to start, little memory
# Values of λ, tried from the largest down, relative to the root-mean-square norm of a matrix's neurons.
LENGTHS = (0.005, 0.00125, 0.0003125)
SECTIONS = 8  # of the rounds; behind each, the KL on validation tokens is measured
VALIDATION_TOKENS = 4096  # about, in whole batches, the same for all sections
# The noise of the steps adds to the KL in proportion to λ²: at most this share of the KL before, for the whole λ. A λ
# that adds more is given up. Less does not tell: the best λ for the small model first raises its KL by 12 to 26 %.
NOISE = 0.5
ROUNDING = 0.02  # of the KL, which a CPU's rounded products may change for the forward passes to use them, too


@dataclass(frozen=True)
class ProjectionOutcome:
    """Result of gradient projection; `before` and `after` are the KL on validation tokens, nats per token."""

    before: float
    after: float
    rounds: int  # kept
    tokens: int  # in the kept rounds
    length: float  # λ of the first round; meaningless if no round was kept


class GradientRounds:
    """The rounds of gradient projection of one model."""

    def __init__(self, model: CarvedModel, text: Sequence[TokenBatch], settings: ProjectConfig, seed: int) -> None:
        """Split the calibration text into validation batches and rounds of `round_tokens`, shuffled by `seed`.

        `run` changes the weights of `model` in place.
        """
        fitted, held_out = split_validation(len(text), settings.validation_share, text_sources(text))
        self._model, self._settings = model, settings
        weights = model.weights()
        self._weights = [weight for _, weight in weights]
        self._dims = [neuron_dim(name) for name, _ in weights]
        self._scales = model.root_mean_squares()
        self._rounds = shuffle_rounds([text[index] for index in fitted], settings, seed)
        self._validation = model.teach(first_batches([text[index] for index in held_out], VALIDATION_TOKENS))

    def run(self) -> ProjectionOutcome:
        """Move every expert down the gradient of the carved model's distance from the dense one.

        Each round takes the gradient on its own tokens, averages it with earlier ones, and moves every neuron's weights
        by α·β·λ along it, while λ falls linearly to 0. Where no λ lowers the KL on validation tokens, all is undone.

        Memory: weights and momentum in fp32, on the host the weights from before, few gradients at a time.
        """
        originals = [weight.to("cpu", copy=True) for weight in self._weights]
        before = self._model.divergence(self._validation)
        with self._products(before) as start:
            after, length = self._try_lengths(originals, start)
        lowered = after < start  # else the last λ may have been given up, behind some of the rounds
        if start != before:
            after = self._model.divergence(self._validation)
        if self._settings.validate and not (lowered and after < before):
            self._restore(originals)
            return ProjectionOutcome(before, before, 0, 0, length)
        return ProjectionOutcome(before, after, len(self._rounds), sum(batch.tokens for batch in self._rounds), length)

    @contextmanager
    def _products(self, exact: float) -> Iterator[float]:
        """Round all products of a CPU with AMX, if that leaves the KL nearly `exact`; yields the KL inside."""
        if self._model.device.type == "cpu" and prefers_large_products(self._model.device):
            with rounded_products():
                rounded = self._model.divergence(self._validation)
                if abs(rounded - exact) < ROUNDING * exact:
                    logger.info("gradient projection rounds all products: KL %.4f instead of %.4f", rounded, exact)
                    yield rounded
                    return
        yield exact

    def _restore(self, originals: Sequence[Tensor]) -> None:
        for weight, original in zip(self._weights, originals, strict=True):
            weight.copy_(original)

    def _try_lengths(self, originals: Sequence[Tensor], start: float) -> tuple[float, float]:
        """KL and λ of the largest λ that lowers the KL, or of the smallest."""
        for length in LENGTHS:
            divergence = self._descend(start, length)
            if divergence < start or not self._settings.validate:
                break
            self._restore(originals)
        return divergence, length

    def _descend(self, start: float, length: float) -> float:
        """KL behind all rounds, or behind the section where it was too high for what is left of λ."""
        velocity = [torch.zeros_like(weight) for weight in self._weights]
        count = len(self._rounds)
        with tqdm(total=count, desc=f"gradient projection, λ {length:g}", unit="round") as bar:
            for section in divide(count, SECTIONS):
                taught = self._model.teach([self._rounds[index] for index in section])
                for number, batch in zip(section, taught, strict=True):
                    self._step(velocity, batch, length * (1 - number / count))
                divergence = self._model.divergence(self._validation)
                bar.set_postfix(kl=f"{divergence:.4f}", refresh=False)
                bar.update(len(section))
                noise = NOISE * (1 - section.stop / count) ** 2
                if self._settings.validate and not divergence <= (1 + noise) * start:
                    break
        return divergence

    def _step(self, velocity: Sequence[Tensor], batch: TaughtBatch, length: float) -> None:
        """One round: move the weights of the model in place, as soon as GRADIENT_BYTES of their gradients are known."""
        strength = self._settings.sign * self._settings.beta * self._settings.alpha * length
        known: list[tuple[int, Tensor]] = []

        def move() -> None:
            places, gradients = [index for index, _ in known], [gradient for _, gradient in known]
            weights, mean = [self._weights[index] for index in places], [velocity[index] for index in places]
            torch._foreach_mul_(mean, MOMENTUM)
            torch._foreach_add_(mean, gradients)
            lengths = [strength * self._scales[index] for index in places]
            dims = [self._dims[index] for index in places]
            project_neurons(weights, mean, lengths, dims, epsilon=self._settings.epsilon)
            known.clear()

        def receive(index: int, gradient: Tensor) -> None:
            known.append((index, gradient))
            if sum(each.nbytes for _, each in known) >= GRADIENT_BYTES:
                move()

        self._model.backward(batch, self._weights, receive)
        if known:  # a worker may hold no experts
            move()


def shuffle_rounds(text: Sequence[TokenBatch], settings: ProjectConfig, seed: int) -> list[TokenBatch]:
    """Batches of about `round_tokens` in random order, about `gradient_tokens` in all; at least one batch."""
    parts = [part for batch in text for part in split_batch(batch, settings.round_tokens)]
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist()
    return first_batches([parts[index] for index in order], settings.gradient_tokens)


def divide(count: int, sections: int) -> list[range]:
    """Split 0 … count − 1 into at most `sections` ranges of nearly equal length, none empty."""
    edges = [round(index * count / min(sections, count)) for index in range(min(sections, count) + 1)]
    return [range(first, last) for first, last in pairwise(edges)]


SEED = 9_000  # in place of a layer index, above all layers


def project_end_to_end(
    context: CalibrationContext,
    make_loops: Callable[[PreTrainedModel], Sequence[ExpertLoop | None]],
    project: ProjectConfig,
) -> tuple[list[ExpertLoop], ProjectionOutcome]:
    """Gradient projection of all layers at once; an expert that layers share gets the sum of its gradients.

    `make_loops` returns the carved layers for the frozen dense model, which is loaded here; None for a layer that stays
    dense. With several workers, each returns its part of the layers, and the leading worker gets the whole ones.
    """
    # Experts are cut from the stored weights, so the teacher is not quantised, even if the scanned model was.
    dense = load_dense(replace(context.model, quantization="none"), context.folder)
    save_memory(dense, asked=project.gradient_checkpointing)
    carved = CarvedModel(dense, make_loops(dense), context.workers)
    outcome = GradientRounds(carved, read_text(context, project), project, layer_seed(context.seed, SEED)).run()
    return gather_parts(carved.loops, context.workers), outcome


def read_text(context: CalibrationContext, project: ProjectConfig) -> list[TokenBatch]:
    """Text that alignment and descent have not read, if there is enough; else the text that they have.

    The gradient of text that they have fitted did not lower the KL of other text for a real model.
    """
    wanted = round(project.gradient_tokens / (1 - project.validation_share))
    further = context.further(wanted)
    tokens = sum(batch.tokens for batch in further)
    if tokens < min(wanted, sum(batch.tokens for batch in context.text)) // 2:
        logger.info("gradient projection reads the text of the alignment: there are %d tokens behind it", tokens)
        return context.text
    logger.info("gradient projection reads %d tokens behind the text of the alignment", tokens)
    return further


def describe_gradients(outcome: ProjectionOutcome | None) -> str:
    """The result of gradient projection in one sentence."""
    if outcome is None:
        return "gradient projection off"
    if not outcome.rounds:
        return "gradient projection tried and undone: no step lowered the KL on validation tokens"
    return (
        f"gradient projection in {outcome.rounds} rounds ({outcome.tokens:,} tokens, λ {outcome.length:g}): KL to the "
        f"dense model on validation tokens {outcome.before:.4f} → {outcome.after:.4f}"
    )
