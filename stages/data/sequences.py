"""Documents to the token sequences the model reads."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from stages.data.config import DataConfig
from stages.data.document import Split
from stages.data.encoding import EncodedDocument, encode_document
from stages.data.skipped import Skipped, describe_nothing_left, describe_skipped, find_fault
from stages.data.sources import describe_source, read_documents

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenSequence:
    """What the model reads at once.

    `labels[t]` is `ids[t]` where the token counts in the loss and -100 elsewhere. Not shifted: position t is predicted
    from the tokens before it, so the label of position 0 is never used.
    """

    name: str
    ids: list[int]
    labels: list[int]
    domain: str = ""  # that most of its tokens are of

    def cut(self, length: int) -> "TokenSequence":
        """The first `length` tokens."""
        return TokenSequence(self.name, self.ids[:length], self.labels[:length], self.domain)


@dataclass(frozen=True)
class LoadedText:
    """What can be learned from, and what was skipped on the way to it."""

    sequences: list[TokenSequence]
    skipped: Skipped  # names of sequences by what was wrong with them

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(sequence.ids) for sequence in self.sequences)


def load_sequences(data: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split) -> list[TokenSequence]:
    """The sequences of `load_text`, for those who need not know what was skipped."""
    return load_text(data, tokenizer, split).sequences


def load_text(data: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split) -> LoadedText:
    """Read one split of the text as token sequences, always the same ones for the same settings and text.

    With `data.labels=generated` this is the text as it stands: conversations with their own answers as labels, plain
    text in full. What a model makes of it: `load_prompts` and `continue_prompts`.

    Args:
        data: the source, how it is packed and labelled, and how many tokens are wanted.
        tokenizer: a fast tokenizer, with a chat template where the text is conversations.
        split: calibration (at most `data.tokens`) or heldout (at most `data.heldout_tokens`). They share no document.

    Returns:
        Sequences of 2 to `data.max_length` tokens, each with a label to learn from; the last may be cut to fit the
        number of tokens. Beside them the names of those skipped before that number was reached.

    Raises:
        DataError: the text cannot be read, or nothing is left of it.
    """
    encoded = (encode_document(document, tokenizer, data) for document in read_documents(data, split))
    build = pack_documents if data.packing == "packed" else truncate_documents
    wanted = data.tokens if split == "calibration" else data.heldout_tokens
    text = select_usable(build(encoded, data.max_length), wanted)
    for note in describe_skipped(text.skipped):
        logger.warning("%s text: %s", split, note)
    if not text.sequences:
        raise describe_nothing_left(data, split, text.skipped)
    source = describe_source(data, split)
    count = len(text.sequences)
    logger.info("%s text: %d of %d tokens, %d sequences of %s", split, text.tokens, wanted, count, source)
    return text


def pack_documents(documents: Iterable[EncodedDocument], max_length: int) -> Iterator[TokenSequence]:
    """Join documents and cut every `max_length` tokens; the rest at the end is a shorter sequence.

    A sequence is named after its number and the document it begins in.
    """
    ids: list[int] = []
    labels: list[int] = []
    domains: list[str] = []  # of every token
    name, number = "", 0
    for document in documents:
        name = name if ids else document.name
        ids += document.ids
        labels += document.labels
        domains += [document.domain] * len(document.ids)
        whole = len(ids) - len(ids) % max_length
        for start in range(0, whole, max_length):
            end = start + max_length
            yield TokenSequence(f"{number}: {name}", ids[start:end], labels[start:end], _most(domains[start:end]))
            name, number = document.name, number + 1
        ids, labels, domains = ids[whole:], labels[whole:], domains[whole:]
    if ids:
        yield TokenSequence(f"{number}: {name}", ids, labels, _most(domains))


def _most(domains: list[str]) -> str:
    return Counter(domains).most_common(1)[0][0]


def truncate_documents(documents: Iterable[EncodedDocument], max_length: int) -> Iterator[TokenSequence]:
    """One sequence per document: its first `max_length` tokens."""
    for document in documents:
        yield TokenSequence(document.name, document.ids[:max_length], document.labels[:max_length], document.domain)


def select_usable(sequences: Iterable[TokenSequence], wanted: int) -> LoadedText:
    """Sequences with a label to learn from until `wanted` tokens are reached, and those skipped before that.

    The last is cut to fit, or left out where that leaves nothing.
    """
    skipped: dict[str, list[str]] = defaultdict(list)
    taken = list(_take_tokens(_skip_unusable(sequences, skipped), wanted))
    return LoadedText(taken, dict(skipped))


def _skip_unusable(sequences: Iterable[TokenSequence], skipped: dict[str, list[str]]) -> Iterator[TokenSequence]:
    for sequence in sequences:
        if fault := find_fault(sequence.labels):
            skipped[fault].append(sequence.name)
        else:
            yield sequence


def _take_tokens(sequences: Iterable[TokenSequence], wanted: int) -> Iterator[TokenSequence]:
    for sequence in sequences:
        if len(sequence.ids) >= wanted:
            last = sequence.cut(wanted)
            if find_fault(last.labels) is None:
                yield last
            return
        wanted -= len(sequence.ids)
        yield sequence
