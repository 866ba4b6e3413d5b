"""Documents to the token sequences the model reads."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from models.errors import DataError
from stages.data.config import DataConfig
from stages.data.document import Split
from stages.data.encoding import IGNORED, EncodedDocument, encode_document
from stages.data.sources import describe_emptiness, describe_source, read_documents

logger = logging.getLogger(__name__)

TOO_SHORT = "fewer than 2 tokens"
ALL_MASKED = "no token counts in the loss"


@dataclass(frozen=True)
class TokenSequence:
    """What the model reads at once.

    `labels[t]` is `ids[t]` where the token counts in the loss and -100 elsewhere. Not shifted: position t is predicted
    from the tokens before it, so the label of position 0 is never used.
    """

    name: str
    ids: list[int]
    labels: list[int]

    def cut(self, length: int) -> "TokenSequence":
        """The first `length` tokens."""
        return TokenSequence(self.name, self.ids[:length], self.labels[:length])


def load_sequences(data: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split) -> list[TokenSequence]:
    """Read one split of the text as token sequences, always the same ones for the same settings and text.

    Args:
        data: the source, how it is packed and labelled, and how many tokens are wanted.
        tokenizer: a fast tokenizer, with a chat template where the text is conversations.
        split: calibration (at most `data.tokens`) or heldout (at most `data.heldout_tokens`). They share no document.

    Returns:
        Sequences of 2 to `data.max_length` tokens, each with a label to learn from; the last may be cut to fit the
        number of tokens. What is skipped is counted in the log.

    Raises:
        DataError: the text cannot be read, or nothing is left of it.
    """
    encoded = (encode_document(document, tokenizer, data) for document in read_documents(data, split))
    build = pack_documents if data.packing == "packed" else truncate_documents
    skipped: dict[str, list[str]] = defaultdict(list)
    usable = _skip_unusable(build(encoded, data.max_length), skipped)
    wanted = data.tokens if split == "calibration" else data.heldout_tokens
    sequences = list(_take_tokens(usable, wanted))
    for fault, names in skipped.items():
        logger.warning("%s text: skipped %d sequences (%s), the first %s", split, len(names), fault, names[0])
    if not sequences:
        raise _nothing_left(data, split, skipped)
    tokens = sum(len(sequence.ids) for sequence in sequences)
    source = describe_source(data, split)
    logger.info("%s text: %d of %d tokens, %d sequences of %s", split, tokens, wanted, len(sequences), source)
    return sequences


def pack_documents(documents: Iterable[EncodedDocument], max_length: int) -> Iterator[TokenSequence]:
    """Join documents and cut every `max_length` tokens; the rest at the end is a shorter sequence.

    A sequence is named after its number and the document it begins in.
    """
    ids: list[int] = []
    labels: list[int] = []
    name, number = "", 0
    for document in documents:
        name = name if ids else document.name
        ids += document.ids
        labels += document.labels
        whole = len(ids) - len(ids) % max_length
        for start in range(0, whole, max_length):
            end = start + max_length
            yield TokenSequence(f"{number}: {name}", ids[start:end], labels[start:end])
            name, number = document.name, number + 1
        ids, labels = ids[whole:], labels[whole:]
    if ids:
        yield TokenSequence(f"{number}: {name}", ids, labels)


def truncate_documents(documents: Iterable[EncodedDocument], max_length: int) -> Iterator[TokenSequence]:
    """One sequence per document: its first `max_length` tokens."""
    for document in documents:
        yield TokenSequence(document.name, document.ids[:max_length], document.labels[:max_length])


def find_fault(sequence: TokenSequence) -> str | None:
    """Why nothing can be learned from a sequence; None where something can."""
    if len(sequence.ids) < 2:
        return TOO_SHORT
    if all(label == IGNORED for label in sequence.labels[1:]):
        return ALL_MASKED
    return None


def _skip_unusable(sequences: Iterable[TokenSequence], skipped: dict[str, list[str]]) -> Iterator[TokenSequence]:
    for sequence in sequences:
        if fault := find_fault(sequence):
            skipped[fault].append(sequence.name)
        else:
            yield sequence


def _take_tokens(sequences: Iterable[TokenSequence], wanted: int) -> Iterator[TokenSequence]:
    """Sequences until `wanted` tokens are reached; the last is cut to fit, or left out where that leaves nothing."""
    for sequence in sequences:
        if len(sequence.ids) >= wanted:
            last = sequence.cut(wanted)
            if find_fault(last) is None:
                yield last
            return
        wanted -= len(sequence.ids)
        yield sequence


def _nothing_left(data: DataConfig, split: Split, skipped: dict[str, list[str]]) -> DataError:
    where = f"{split} text of {describe_source(data, split)}"
    if masked := skipped.get(ALL_MASKED):
        return DataError(
            f"every label is masked: none of {len(masked)} sequences has a token that counts in the loss",
            where=f"{where}, data.labels={data.labels}, data.max_length={data.max_length}",
            do="a larger data.max_length, if the answers begin after the cut, or data.labels=full_sequence",
        )
    if skipped:
        return DataError(
            f"none of {len(skipped[TOO_SHORT])} sequences has 2 tokens", where=where, do="name text that holds more"
        )
    return describe_emptiness(data, split)
