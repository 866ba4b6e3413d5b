"""Documents to the prompts that a model continues."""

import logging
from collections import defaultdict
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from instruments.errors import DataError
from stages.text.chat import encode_prompt
from stages.text.config import DataConfig
from stages.text.documents import Document
from stages.text.sequences import IGNORED, LoadedText, Skipped, TokenSequence, describe_skipped, encode_text
from stages.text.sources import describe_emptiness, describe_source, read_documents

logger = logging.getLogger(__name__)

NO_PROMPT = "nothing stands before the answer"
NO_ROOM = "the prompt leaves data.max_length no room for data.max_new_tokens"


def load_prompts(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> LoadedText:
    """Read the calibration text as prompts, one per document, always the same ones for the same settings and text.

    The prompt of a conversation is all before its last answer, the assistant's turn opened; that of plain text is its
    first `data.prompt_tokens`. A conversation too long to be answered within `data.max_length` is skipped, not cut.

    Returns:
        Prompts without labels, as many as could fill `data.tokens` alone: `continue_prompts` uses those it needs.

    Raises:
        DataError: the text cannot be read, or no document makes a prompt.
    """
    skipped: dict[str, list[str]] = defaultdict(list)
    prompts: list[TokenSequence] = []
    room = data.tokens
    for prompt in _read_prompts(data, tokenizer, skipped):
        prompts.append(prompt)
        room -= len(prompt.ids)
        if room <= 0:
            break
    for note in describe_skipped(skipped):
        logger.warning("prompts: %s", note)
    if not prompts:
        raise _no_prompts(data, skipped)
    return LoadedText(prompts, dict(skipped))


def _read_prompts(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, skipped: dict[str, list[str]]
) -> Iterator[TokenSequence]:
    for document in read_documents(data, "calibration"):
        ids = _encode(document, tokenizer, data)
        if not ids:
            skipped[NO_PROMPT].append(document.name)
        elif len(ids) + data.max_new_tokens > data.max_length:
            skipped[NO_ROOM].append(document.name)
        else:
            yield TokenSequence(document.name, ids, [IGNORED] * len(ids), document.domain)


def _encode(document: Document, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> list[int]:
    if document.messages:
        return encode_prompt(document, tokenizer)
    ids = encode_text(document.text, tokenizer, data.separator)
    # A text that fits whole is continued, not ended.
    if data.separator == "eos" and ids[-1:] == [tokenizer.eos_token_id]:
        ids.pop()
    return ids[: data.prompt_tokens]


def _no_prompts(data: DataConfig, skipped: Skipped) -> DataError:
    if not skipped:
        return describe_emptiness(data, "calibration")
    counts = ", ".join(f"{len(names)} ({fault})" for fault, names in skipped.items())
    return DataError(
        f"no document makes a prompt; skipped: {counts}",
        where=f"calibration text of {describe_source(data, 'calibration')}, data.max_length={data.max_length}, "
        f"data.max_new_tokens={data.max_new_tokens}",
        do="a larger data.max_length, or conversations that begin with a question",
    )
