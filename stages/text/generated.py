"""Text that the model generates: prompts with their continuations; only the continuations have labels."""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.random import fork_rng
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from instruments.files import write_json, write_text
from models.loading import input_device, padding_id
from stages.artifacts.job import ALONE, Workers
from stages.text.batches import IGNORED, TokenSequence, group_lengths
from stages.text.chat import encode_prompt
from stages.text.config import DataConfig, Source, list_sources
from stages.text.documents import Document
from stages.text.sequences import (
    NO_PROMPT,
    NO_ROOM,
    NO_TEXT,
    NOTHING_WRITTEN,
    LoadedText,
    describe_skipped,
    encode_text,
    find_begin,
    missing_begin,
    mix,
    require_embeddings,
    require_sequences,
    select_usable,
)
from stages.text.sources import read_sources
from stages.text.template import alike

logger = logging.getLogger(__name__)

GENERATED, WRITTEN = "generated.json", "written.jsonl"


def load_prompts(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> LoadedText:
    """Read the calibration text as prompts, one per document; deterministic.

    The prompt of a conversation is all before its last answer, with the assistant's turn opened; that of plain text is
    its first `data.prompt_tokens`. Both start with the begin token, if the tokenizer adds one.
    Conversations that leave no room for an answer within `data.max_length` are skipped.

    Returns:
        Prompts without labels, enough to fill `data.tokens` by themselves; `continue_prompts` uses those it needs.

    Raises:
        DataError: the text cannot be read, or no document gives a prompt.
    """
    parts = [
        (source, _read_prompts(source, documents, tokenizer)) for source, documents in read_sources(data, "calibration")
    ]
    return parts[0][1] if len(parts) == 1 else mix(parts, data.max_new_tokens)


def _read_prompts(source: Source, documents: Iterator[Document], tokenizer: PreTrainedTokenizerBase) -> LoadedText:
    skipped: dict[str, list[str]] = defaultdict(list)
    prompts: list[TokenSequence] = []
    room = source.tokens
    for document in documents:
        ids = encode_start(document, tokenizer, source)
        if not ids:
            skipped[NO_PROMPT].append(document.name)
        elif len(ids) + source.max_new_tokens > source.max_length:
            skipped[NO_ROOM].append(document.name)
        else:
            prompts.append(TokenSequence(document.name, ids, [IGNORED] * len(ids)))
            room -= len(ids)
        if room <= 0:
            break
    if source.without_text:
        skipped[NO_TEXT] = source.without_text
    text = LoadedText(prompts, dict(skipped))
    require_sequences(text, source)
    for note in describe_skipped(skipped):
        logger.warning("prompts: %s", note)
    require_embeddings(prompts, tokenizer)
    return text


def encode_start(document: Document, tokenizer: PreTrainedTokenizerBase, data: Source, opening: str = "") -> list[int]:
    """Token ids up to where the model goes on: at the assistant's turn, or after `data.prompt_tokens` of plain text.

    `opening`: see `encode_prompt`.
    """
    if document.messages:
        ids, longest = encode_prompt(document, tokenizer, data, opening), None
    else:
        ids, longest = encode_text(document.text, tokenizer, data.separator), data.prompt_tokens
        # Without the end-of-text token that the text itself lacks, so that the model continues a short text.
        ended = document.text.endswith(str(tokenizer.eos_token))
        if data.separator == "eos" and ids[-1:] == [tokenizer.eos_token_id] and not ended:
            ids.pop()
    return (missing_begin(find_begin(tokenizer), ids[:1]) + ids)[:longest] if ids else []


def continue_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: LoadedText,
    data: DataConfig,
    *,
    seed: int,
    batch_tokens: int,
    workers: Workers = ALONE,
    file: Path | None = None,
) -> LoadedText:
    """Let the model continue prompts until there are `data.tokens` tokens, prompts included.

    Batches hold at most `batch_tokens`, padding and new tokens included. They are fixed, ordered and seeded one by one,
    so that the number of workers does not change the sequences. `file` keeps continuations: a killed run goes on there.

    Returns:
        Sequences of at most `data.max_length` tokens, the last cut to fit. Labels are on the generated tokens,
        including the end token. Prompts with an empty continuation count as skipped.

    Raises:
        DataError: all continuations are empty.
    """
    ends, pad_id = find_ends(model, tokenizer), padding_id(tokenizer)
    ids = [prompt.ids for prompt in prompts.sequences]
    groups = group_lengths([len(prompt) + data.max_new_tokens for prompt in ids], batch_tokens)
    kept: list[list[int]] = workers.lead(lambda: _read_written(file)) if file else []
    done = sum(group.stop <= len(kept) for group in groups)  # batches; another machine may have written larger ones
    written = kept[: groups[done - 1].stop] if done else []
    if file and workers.leads:
        write_text(file, f"{json.dumps(written)}\n")
    tokens = _count_tokens(ids, written)
    with tqdm(total=data.tokens, desc="generate", unit="tok", smoothing=0.1, disable=not workers.leads) as progress:
        for first in range(done, len(groups), workers.world):
            progress.update(min(tokens, data.tokens) - progress.n)
            if tokens >= data.tokens:
                break
            mine = groups[first + workers.rank] if first + workers.rank < len(groups) else range(0)
            batch = ids[mine.start : mine.stop]
            found = write_continuations(model, batch, data, ends, pad_id, seed=seed + mine.start) if batch else []
            news = [row for part in workers.gather(found) for row in part]
            tokens += _count_tokens(ids[len(written) :], news)
            written += news
            if file and workers.leads:
                with file.open("a", encoding="utf-8") as out:
                    out.write(f"{json.dumps(news)}\n")
        progress.update(min(tokens, data.tokens) - progress.n)
    text = _join(prompts, written, data.tokens)
    require_sequences(text, list_sources(data, "calibration")[0])
    logger.info("generated text: %d of %d tokens, %d sequences", text.tokens, data.tokens, len(text.sequences))
    return text


def _count_tokens(prompts: Sequence[Sequence[int]], written: Sequence[Sequence[int]]) -> int:
    return sum(len(prompt) + len(row) for prompt, row in zip(prompts, written, strict=False) if row)


def _read_written(file: Path) -> list[list[int]]:
    """The continuations in `file`, which may be missing, or end in a torn line."""
    written: list[list[int]] = []
    with suppress(FileNotFoundError, ValueError), file.open(encoding="utf-8") as lines:
        for line in lines:
            written += json.loads(line)
    return written


def generate_text(
    load: Callable[[], PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    scratch: Path,
    *,
    seed: int,
    at_once: Callable[[PreTrainedModel], int],
    workers: Workers = ALONE,
) -> LoadedText:
    """The prompts of the calibration text, continued by the model that `load` returns; kept in `scratch`.

    What a killed run has kept is read instead, and the model not loaded. `at_once`: tokens of a batch.
    """
    text: LoadedText | None = workers.lead(lambda: load_generated(scratch))
    if text is None:
        prompts, model = load_prompts(data, tokenizer), load()
        size = at_once(model)
        text = continue_prompts(
            model, tokenizer, prompts, data,
            seed=seed, batch_tokens=size, workers=workers, file=scratch / WRITTEN,
        )  # fmt: skip
        if workers.leads:
            write_json(scratch / GENERATED, asdict(text))  # atomically: a resumed run reads the same tokens
    return text


def load_generated(scratch: Path) -> LoadedText | None:
    """Read what `generate_text` kept; None if there is no file."""
    if not (scratch / GENERATED).exists():
        return None
    found = json.loads((scratch / GENERATED).read_text(encoding="utf-8"))
    return LoadedText([TokenSequence(**sequence) for sequence in found["sequences"]], found["skipped"])


def decode_behind(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int], *, special: bool = False
) -> str:
    """The text of `ids` behind a prompt; a decoder such as Llama 2's drops the space before the first token of all.

    A character that the prompt only begins belongs to the text; so do special tokens, if asked for.
    """
    parts = ([*prompt, *ids], [*prompt])
    whole, before = (str(tokenizer.decode(part, skip_special_tokens=not special)) for part in parts)
    return whole[alike(whole, before) :]


def write_continuations(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    data: DataConfig,
    ends: Collection[int],
    pad_id: int,
    *,
    seed: int,
    criteria: Sequence[StoppingCriteria] = (),
) -> list[list[int]]:
    """Generate a continuation of each prompt of a batch, up to and including one of `ends`; [] if it begins with one.

    A continuation that ends by `criteria` is followed by `pad_id`, if others of the batch are longer.

    The model must be in evaluation mode; torch's random state is restored. The checkpoint's generation settings are not
    used, so that no penalty or ban changes the model's distribution.

    Numerics: the other prompts of the batch affect greedy choices by rounding only.
    """
    ids_BT = _pad_left(prompts, pad_id)
    mask_BT = _pad_left([[1] * len(prompt) for prompt in prompts], 0)
    drawing = {"do_sample": True, "temperature": data.temperature, "top_k": 0} if data.temperature else {}
    settings = GenerationConfig(
        max_new_tokens=data.max_new_tokens, eos_token_id=sorted(ends) or None, pad_token_id=pad_id, **drawing
    )
    device, own = input_device(model), model.generation_config
    # `generate` fills open settings from the model's own, so that they are replaced.
    model.generation_config = settings
    try:
        head = model.get_output_embeddings()
        with torch.no_grad(), fork_rng(range(torch.cuda.device_count())), head.register_forward_pre_hook(_contiguous):
            torch.manual_seed(seed)
            rows_BT = model.generate(
                input_ids=ids_BT.to(device),
                attention_mask=mask_BT.to(device),
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList(criteria),
            )
    finally:
        model.generation_config = own
    return [_cut_at_end(row, ends) for row in rows_BT[:, ids_BT.shape[1] :].tolist()]


def _contiguous(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """The last hidden states of the prompts are a slice: for each of them torch would copy the weight of the head."""
    return (args[0].contiguous(),)


def _pad_left(rows: Sequence[Sequence[int]], value: int) -> Int64[Tensor, "B T"]:
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side="left")


def find_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End tokens of the checkpoint's generation settings and of the tokenizer."""
    stated = getattr(model.generation_config, "eos_token_id", None)
    stated = stated if isinstance(stated, list) else [stated]
    return frozenset(token for token in (*stated, tokenizer.eos_token_id) if token is not None)


def _cut_at_end(ids: list[int], ends: Collection[int]) -> list[int]:
    last = next((place for place, id_ in enumerate(ids) if id_ in ends), len(ids))
    return ids[: last + 1] if last else []


def _join(prompts: LoadedText, written: Sequence[Sequence[int]], wanted: int) -> LoadedText:
    """Join prompts and continuations in order, until `wanted` tokens; prompts without a continuation are skipped."""
    silent: list[str] = []

    def join() -> Iterator[TokenSequence]:
        for prompt, tokens in zip(prompts.sequences, written, strict=False):
            if tokens:
                yield replace(prompt, ids=[*prompt.ids, *tokens], labels=[*prompt.labels, *tokens])
            else:
                silent.append(prompt.name)

    sequences = select_usable(join(), wanted).sequences
    skipped = {NOTHING_WRITTEN: silent} if silent else {}
    for note in describe_skipped(skipped):
        logger.warning("generated text: %s", note)
    return LoadedText(sequences, {**prompts.skipped, **skipped})
