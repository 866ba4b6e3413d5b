"""Text that the model writes itself: each prompt with its continuation, labels on what was written."""

import json
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from models.errors import DataError
from stages.contracts.workers import ALONE, Workers
from stages.data.batches import group_lengths
from stages.data.config import DataConfig
from stages.data.continuation import Writing, find_ends, write_continuations
from stages.data.encoding import IGNORED
from stages.data.sequences import LoadedText, TokenSequence, select_usable
from stages.data.skipped import describe_skipped
from stages.data.written import Written, WrittenFile

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
