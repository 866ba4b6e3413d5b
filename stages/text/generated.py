"""Text that the model writes itself: each prompt with its continuation, labels on what was written."""

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from instruments.errors import DataError
from models.loading import input_device
from stages.artifacts.workers import ALONE, Workers
from stages.text.config import DataConfig
from stages.text.sequences import IGNORED, LoadedText, TokenSequence, describe_skipped, group_lengths, select_usable
from stages.text.written import Written, WrittenFile


class SeededSampling(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed
    """Noise under which the largest logit is a draw from softmax(logits / temperature).

    Every prompt has noise of its own at every step, so that its continuation depends neither on its batch nor on what
    was drawn before: batches, workers and resumed runs give the same tokens.

    Numerics: fp32; argmax(z + τ·g) with Gumbel noise g = -log(Exp(1)) follows softmax(z / τ) exactly.
    Source: the Gumbel-max trick, arXiv:1411.0030.
    """

    def __init__(self, numbers: Sequence[int], *, temperature: float, seed: int, prompt_length: int) -> None:
        """Sample a batch.

        Args:
            numbers: of its prompts, one per row.
            temperature: τ, above 0.
            seed: of all draws.
            prompt_length: tokens of a row before the first written one, padding included.
        """
        self.numbers, self.temperature, self.seed, self.prompt_length = numbers, temperature, seed, prompt_length

    def __call__(self, input_ids: Int64[Tensor, "B T"], scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Add the noise of this step to the logits."""
        step = input_ids.shape[1] - self.prompt_length
        noise_BV = torch.empty_like(scores, dtype=torch.float32)
        for row_V, number in zip(noise_BV, self.numbers, strict=True):
            generator = torch.Generator(scores.device).manual_seed(draw_seed(self.seed, number, step))
            row_V.exponential_(generator=generator).log_()
        return scores - self.temperature * noise_BV


def draw_seed(seed: int, number: int, step: int) -> int:
    """A seed of its own for each prompt and step."""
    return int.from_bytes(blake2b(f"{seed} {number} {step}".encode(), digest_size=7).digest(), "big")


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


logger = logging.getLogger(__name__)

NOTHING_WRITTEN = "the model ended the text at once"


def continue_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: LoadedText,
    data: DataConfig,
    *,
    seed: int,
    batch_tokens: int,
    resume_file: Path | None = None,
    workers: Workers = ALONE,
) -> LoadedText:
    """Let the model continue prompts until `data.tokens` tokens, prompts included, are reached.

    Prompts are numbered and taken in order. The same sequences come out of any number of workers and of a resumed run;
    of other batches, too, but for the rounding of logits that nearly tie.

    Args:
        model: a causal language model, of any precision, on one device or many; the same for every worker.
        tokenizer: its tokenizer.
        prompts: of `load_prompts`, the same for every worker.
        data: how much is written, and at which temperature.
        seed: of the draws where the temperature is above 0.
        batch_tokens: tokens per batch, padding and what is to be written included.
        resume_file: keeps every finished batch, at the leading worker; None keeps nothing.
        workers: who shares the work.

    Returns:
        Sequences of at most `data.max_length` tokens, the last cut to fit, whose labels are the written tokens, the one
        that ends the text included; beside the prompts' skipped names those after which nothing was written.

    Raises:
        DataError: nothing was written after any prompt.
        ContractError: the resume file is damaged or belongs to something else.
    """
    writing = Writing(data.max_new_tokens, data.temperature, seed)
    ends = find_ends(model, tokenizer)
    ids = [prompt.ids for prompt in prompts.sequences]
    groups = group_lengths([len(prompt) + data.max_new_tokens for prompt in ids], batch_tokens)
    file = WrittenFile(resume_file, _facts(ids, writing, ends)) if resume_file and workers.leads else None
    written: Written = workers.follow(file.read() if file else {})
    with tqdm(total=data.tokens, desc="generate", unit="tok", smoothing=0.1, disable=not workers.leads) as progress:
        progress.update(min(_count(ids, written, ends), data.tokens))
        for first in range(0, len(groups), workers.world):
            if _count(ids, written, ends) >= data.tokens:
                break
            share = groups[first + workers.rank] if first + workers.rank < len(groups) else ()
            mine = {number: ids[number] for number in share if number not in written}
            found = write_continuations(model, mine, writing, ends, tokenizer.pad_token_id or 0) if mine else {}
            news = {number: tokens for part in workers.share(found) for number, tokens in part.items()}
            written |= news
            if file and news:
                file.add(news)
            progress.update(min(_count(ids, written, ends), data.tokens) - progress.n)
    return _label(prompts, written, ends, data.tokens)


def _facts(ids: Sequence[Sequence[int]], writing: Writing, ends: Collection[int]) -> dict[str, object]:
    """What continuations depend on beside the model."""
    digest = blake2b(json.dumps(ids).encode(), digest_size=8).hexdigest()
    return {"prompts": digest, "ends": sorted(ends), **asdict(writing)}


def _count(ids: Sequence[Sequence[int]], written: Written, ends: Collection[int]) -> int:
    """Tokens of the sequences so far."""
    return sum(len(ids[number]) + len(tokens) for number, tokens in written.items() if not _is_silent(tokens, ends))


def _is_silent(tokens: Sequence[int], ends: Collection[int]) -> bool:
    return len(tokens) == 1 and tokens[0] in ends


def _label(prompts: LoadedText, written: Written, ends: Collection[int], wanted: int) -> LoadedText:
    """Prompts and continuations joined, in the prompts' order, until `wanted` tokens."""
    silent: list[str] = []

    def join() -> Iterator[TokenSequence]:
        for number, prompt in enumerate(prompts.sequences):
            tokens = written.get(number)
            if tokens is None:
                return
            if _is_silent(tokens, ends):
                silent.append(prompt.name)
            else:
                labels = [IGNORED] * len(prompt.ids) + tokens
                yield TokenSequence(prompt.name, prompt.ids + tokens, labels, prompt.domain)

    text = select_usable(join(), wanted)
    for note in describe_skipped({NOTHING_WRITTEN: silent}):
        logger.warning("generated text: %s", note)
    if not text.sequences:
        raise DataError(
            f"the model ended the text at once after each of {len(silent)} prompts",
            where="data.labels=generated",
            do="data.labels=full_sequence, or prompts that call for an answer",
        )
    logger.info("generated text: %d of %d tokens, %d sequences", text.tokens, wanted, len(text.sequences))
    return LoadedText(text.sequences, {**prompts.skipped, **({NOTHING_WRITTEN: silent} if silent else {})})
