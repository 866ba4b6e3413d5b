"""One batch of prompts continued through `generate()`."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from models.placement import input_device
from stages.data.sampling import SeededSampling


@dataclass(frozen=True)
class Writing:
    """How the model writes."""

    max_new_tokens: int
    temperature: float  # 0: the likeliest token each time
    seed: int


def write_continuations(
    model: PreTrainedModel, prompts: Mapping[int, Sequence[int]], writing: Writing, ends: Collection[int], pad_id: int
) -> dict[int, list[int]]:
    """What the model writes after each prompt, up to and with the token that ends it.

    The model is in evaluation mode meanwhile, whatever mode its modules are in, and nothing of it is changed. Of its
    generation settings none is used: no sampling, penalty or ban comes between the model and what it would write.

    Args:
        model: a causal language model, of any precision, on one device or many.
        prompts: token ids by number; a number is the prompt's own, whatever batch it is in.
        writing: how long, and how tokens are chosen.
        ends: tokens that end a continuation.
        pad_id: any token.

    Returns:
        Written token ids by number, at least one each.

    Numerics: greedy choices depend on the other prompts of the batch by rounding alone.
    """
    numbers = list(prompts)
    ids_BT, mask_BT = pad_left([prompts[number] for number in numbers], pad_id)
    length = ids_BT.shape[1]
    processors = LogitsProcessorList()
    if writing.temperature > 0:
        processors.append(
            SeededSampling(numbers, temperature=writing.temperature, seed=writing.seed, prompt_length=length)
        )
    settings = GenerationConfig(
        max_new_tokens=writing.max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad_id,
    )
    device = input_device(model)
    with _only_these(model, settings), _evaluating(model), torch.no_grad():
        rows_BT = model.generate(
            input_ids=ids_BT.to(device),
            attention_mask=mask_BT.to(device),
            generation_config=settings,
            logits_processor=processors,
        )
    written = (cut_at_end(row, ends) for row in rows_BT[:, length:].tolist())
    return dict(zip(numbers, written, strict=True))


def find_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a text: those of the checkpoint's generation settings, and the tokenizer's own."""
    stated = getattr(model.generation_config, "eos_token_id", None)
    stated = stated if isinstance(stated, list) else [stated]
    return frozenset(token for token in (*stated, tokenizer.eos_token_id) if token is not None)


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Int64[Tensor, "B T"], Int64[Tensor, "B T"]]:
    """Token ids that all end in the last column, and their mask: 1 = token, 0 = padding."""
    length = max(len(row) for row in rows)
    ids = [[pad_id] * (length - len(row)) + list(row) for row in rows]
    mask = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


def cut_at_end(ids: list[int], ends: Collection[int]) -> list[int]:
    """The tokens up to and with the first that ends a text; all where none does."""
    last = next((place for place, id_ in enumerate(ids) if id_ in ends), len(ids))
    return ids[: last + 1]


@contextmanager
def _only_these(model: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    """Hide the checkpoint's generation settings: what a call leaves open is taken from there."""
    own = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode; layers set to recompute activations, by their training flag, would do without the cache."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
