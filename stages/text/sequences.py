"""Token sequences of documents."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter

from transformers import PreTrainedTokenizerBase

from instruments.errors import DataError, some
from models.loading import is_panic, vocabulary_size
from stages.text.batches import IGNORED, TokenSequence
from stages.text.chat import encode_conversation
from stages.text.config import DataConfig, Source, Split
from stages.text.documents import Document
from stages.text.files import describe_files
from stages.text.sources import describe_emptiness, read_sources
from stages.text.template import RenderingError

logger = logging.getLogger(__name__)


def encode_document(document: Document, tokenizer: PreTrainedTokenizerBase, source: Source) -> TokenSequence:
    """Tokenize one document with its end token.

    Raises DataError: a conversation cannot be rendered or labelled, or the tokenizer fails.
    """
    try:
        if document.messages:
            ids, supervised = encode_conversation(document, tokenizer, source)
            labels = [id_ if counts else IGNORED for id_, counts in zip(ids, supervised, strict=True)]
            return TokenSequence(document.name, ids, labels)
        ids = encode_text(document.text, tokenizer, source.separator)
        return TokenSequence(document.name, ids, ids)
    except BaseException as error:
        if not is_panic(error):
            raise
        what, do = f"the tokenizer fails: {str(error)[:200]}", "the model's own tokenizer files, or other text"
        where = f"{document.name}, tokenizer {tokenizer.name_or_path}"
        raise DataError(what, where=where, do=do) from error


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, separator: str) -> list[int]:
    """Tokenize plain text with its separator.

    eos: with the tokenizer's special tokens (Llama: a begin token) and the end-of-text token; blank_line: only a blank
    line after the text.
    """
    if separator == "blank_line":
        return list(tokenizer(text + "\n\n", add_special_tokens=False, verbose=False)["input_ids"])
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return ids


# Fault → names of the sequences skipped for it.
Skipped = Mapping[str, Sequence[str]]

TOO_SHORT = "fewer than 2 tokens"
NO_TEXT = "their text is in other columns than those that are read"
ALL_MASKED = "no token counts in the loss"
# Faults of prompts and of what the model writes after them.
NO_PROMPT = "no text before the answer"
NO_ROOM = "the prompt leaves data.max_length no room for an answer"
NOTHING_WRITTEN = "the model ended the text at once"
# Fault → remedy if no sequence is left.
REMEDIES = {
    TOO_SHORT: "name text that holds more",
    NO_TEXT: "data.text_column= or data.messages_column= with one of their columns",
    ALL_MASKED: "data.labels=full_sequence, or larger data.max_length and data.tokens if answers begin after the cut",
    NO_PROMPT: "conversations that begin with a question",
    NO_ROOM: "a larger data.max_length",
    NOTHING_WRITTEN: "prompts that call for an answer",
}


# Records that are tried after one that the chat template does not write whole, to say how many are like it.
COUNTED = 99


@dataclass(frozen=True)
class LoadedText:
    """Usable sequences, and the names of the skipped ones."""

    sequences: list[TokenSequence]
    skipped: Skipped

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(sequence.ids) for sequence in self.sequences)


def find_fault(labels: Sequence[int]) -> str | None:
    """Why a sequence with these labels has no loss; None if it has one. Nothing predicts the first label."""
    if len(labels) < 2:
        return TOO_SHORT
    return None if any(label != IGNORED for label in labels[1:]) else ALL_MASKED


def describe_skipped(skipped: Skipped) -> list[str]:
    """One sentence per fault, for tables, logs and errors: number and first names of the skipped sequences."""
    return [
        f"skipped {len(names)} sequence{'' if len(names) == 1 else 's'} ({fault}: {some(names, separator=', ')})"
        for fault, names in skipped.items()
    ]


def require_sequences(text: LoadedText, source: Source) -> None:
    """Raise DataError if no sequence is left."""
    if text.sequences:
        return
    if not text.skipped:
        raise describe_emptiness(source)
    where = f"{source.title}, {source.place}.labels={source.labels}, data.max_length={source.max_length}"
    what = f"the {source.use} text has no usable sequence: {'; '.join(describe_skipped(text.skipped))}"
    raise DataError(what, where=where, do=", or ".join(REMEDIES[fault] for fault in text.skipped))


def require_embeddings(sequences: Iterable[TokenSequence], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError at a token that the tokenizer has and the model has not."""
    known = vocabulary_size(tokenizer)
    for sequence in sequences:
        if known is not None and (last := max(sequence.ids)) >= known:
            name = tokenizer.convert_ids_to_tokens(last)
            what = f"the tokenizer makes token {last}, {name!r}, and the model has {known}"
            do = "the tokenizer and the chat template of these weights, or text without this token"
            raise DataError(what, where=f"{sequence.name}, tokenizer {tokenizer.name_or_path}", do=do)


# Cache of one entry: the stages of a run share one DataConfig, so that its calibration split is tokenized once.
_last_calibration: list[tuple[DataConfig, str, LoadedText]] = []


def load_text(data: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split) -> LoadedText:
    """Read one split of the text as token sequences; deterministic.

    The splits share no document, unless a dataset of the hub has copies in two splits of its own.
    With `data.labels=generated` the text is read unchanged: the answers of conversations have labels, and all plain
    text. `load_prompts` and `continue_prompts` read the generated text.

    Returns:
        Sequences of 2 to `data.max_length` tokens, each with a label that counts; at most `data.tokens` or
        `data.heldout_tokens` in all, the last cut to fit; every prefix holds the sources by their shares.
        Also the names of skipped sequences.

    Raises:
        DataError: a source cannot be read, or has no usable sequence.
    """
    key = f"{tokenizer.name_or_path} {data}"
    for last_data, last_key, text in _last_calibration:
        if split == "calibration" and last_data is data and last_key == key:
            return text
    text = _read_text(data, tokenizer, split)
    if split == "calibration":
        _last_calibration[:] = [(data, key, text)]
    return text


def load_further(data: DataConfig, tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[TokenSequence]:
    """About `tokens` tokens of the calibration split behind those of `load_text`; fewer, or none, where the text ends.

    What is wrong with that text is a warning.
    """
    known = load_text(data, tokenizer, "calibration").sequences
    try:
        longer = _read_text(replace(data, tokens=data.tokens + tokens), tokenizer, "calibration").sequences
    except DataError as error:
        logger.warning("no text behind the first %d tokens: %s", data.tokens, error)
        return []
    # Each source begins with the same sequences; the last of them may be longer.
    met = Counter(sequence.source for sequence in known)
    further: list[TokenSequence] = []
    for sequence in longer:
        met[sequence.source] -= 1
        if met[sequence.source] < 0:
            further.append(sequence)
    return further


def _read_text(data: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split) -> LoadedText:
    parts = [(source, _load_source(source, documents, tokenizer)) for source, documents in read_sources(data, split)]
    return parts[0][1] if len(parts) == 1 else mix(parts)


def _load_source(source: Source, documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase) -> LoadedText:
    encoded = _encode_documents(iter(documents), tokenizer, source)
    build = pack_documents if source.packing == "packed" else truncate_documents
    text = select_usable(build(encoded, source.max_length, find_begin(tokenizer)), source.tokens)
    if source.without_text:
        text = replace(text, skipped={**text.skipped, NO_TEXT: source.without_text})
    require_sequences(text, source)
    require_embeddings(text.sequences, tokenizer)
    for note in describe_skipped(text.skipped):
        logger.warning("%s text: %s", source.use, note)
    counts = text.tokens, source.tokens, len(text.sequences)
    files = describe_files(source) if source.kind == "text" else ""
    logger.info("%s text: %d of %d tokens, %d sequences of %s%s", source.use, *counts, source.title, files)
    return text


def _encode_documents(
    documents: Iterator[Document], tokenizer: PreTrainedTokenizerBase, source: Source
) -> Iterator[TokenSequence]:
    """Tokenize documents; the error for a conversation that is not written whole counts further ones."""
    shared: dict[int, int] = {}  # one number a token id; a tokenizer returns new ones, of 32 bytes for each token
    for document in documents:
        try:
            found = encode_document(document, tokenizer, source)
            ids, labels = ([shared.setdefault(id_, id_) for id_ in part] for part in (found.ids, found.labels))
            yield replace(found, ids=ids, labels=labels)
        except RenderingError as error:
            read = refused = 0
            with suppress(DataError):  # a record that cannot be read
                for other in islice(documents, COUNTED):
                    read += 1
                    try:
                        encode_document(other, tokenizer, source)
                    except RenderingError:
                        refused += 1
            what = f"{error.what}; and those of {refused} of the next {read} records"
            raise RenderingError(what, where=error.where, do=error.do) from error


def mix(parts: Sequence[tuple[Source, LoadedText]], answer: int = 0) -> LoadedText:
    """The sequences of several sources, with their names, so that every prefix holds the sources by their shares.

    `answer` is the number of tokens that will be added to each sequence.
    """
    counts = [min(text.tokens + answer * len(text.sequences), source.tokens) for source, text in parts]
    placed: list[tuple[float, TokenSequence]] = []
    skipped: dict[str, list[str]] = defaultdict(list)
    for count, (source, text) in zip(counts, parts, strict=True):
        found = count / sum(counts)
        if abs(found - source.share) > 0.1 * source.share:
            message = "%s text: source %s has %.1f%% of the tokens, and its share is %.1f%%"
            logger.warning(message, source.use, source.title, 100 * found, 100 * source.share)
        end = 0
        for sequence in text.sequences:
            # The position of its middle within its source, divided by the share.
            length = len(sequence.ids) + answer
            placed.append(((end + length / 2) / source.share, replace(sequence, source=source.title)))
            end += length
        for fault, names in text.skipped.items():
            skipped[fault].extend(names)
    return LoadedText([sequence for _, sequence in sorted(placed, key=itemgetter(0))], dict(skipped))


def find_begin(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The begin token, if the tokenizer starts every text with it (Llama, Gemma); None: it does not (Qwen)."""
    begin: int | None = tokenizer.bos_token_id
    return begin if begin is not None and list(tokenizer("a", verbose=False)["input_ids"])[:1] == [begin] else None


def pack_documents(
    documents: Iterable[TokenSequence], max_length: int, begin: int | None = None
) -> Iterator[TokenSequence]:
    """Concatenate documents and cut them into sequences of `max_length` tokens; the last may be shorter.

    Every sequence starts with the token `begin`, since models that expect it compute badly without it. A sequence's
    name is its number and the name of its first document.
    """
    ids: list[int] = []
    labels: list[int] = []
    name, number = "", 0

    def cut(start: int) -> tuple[int, TokenSequence]:
        first = missing_begin(begin, ids[start : start + 1])
        end = start + max_length - len(first)
        shown = [IGNORED] * len(first) + labels[start:end]
        return end, TokenSequence(f"{number}: {name}", first + ids[start:end], shown)

    for document in documents:
        name = name if ids else document.name
        ids += document.ids
        labels += document.labels
        start = 0
        while len(ids) - start >= max_length:
            start, sequence = cut(start)
            yield sequence
            name, number = document.name, number + 1
        ids, labels = ids[start:], labels[start:]
    if ids:
        yield cut(0)[1]


def truncate_documents(
    documents: Iterable[TokenSequence], max_length: int, begin: int | None = None
) -> Iterator[TokenSequence]:
    """One sequence per document: its first `max_length` tokens, with the token `begin` first."""
    for document in documents:
        first = missing_begin(begin, document.ids[:1])
        ids, labels = first + document.ids, [IGNORED] * len(first) + document.labels
        yield TokenSequence(document.name, ids[:max_length], labels[:max_length])


def missing_begin(begin: int | None, start: list[int]) -> list[int]:
    """The begin token as a list; [] if there is none, or `start`, a sequence's first token, is it."""
    return [] if begin is None or start == [begin] else [begin]


def select_usable(sequences: Iterable[TokenSequence], wanted: int) -> LoadedText:
    """Take sequences with a label that counts until there are `wanted` tokens; the others are skipped.

    The last is cut to fit, and skipped if no label remains.
    """
    taken: list[TokenSequence] = []
    skipped: dict[str, list[str]] = defaultdict(list)
    for sequence in sequences:
        if fault := find_fault(sequence.labels):
            skipped[fault].append(sequence.name)
            continue
        fitting = sequence.cut(wanted)
        if fault := find_fault(fitting.labels):
            skipped[fault].append(sequence.name)
        else:
            taken.append(fitting)
        wanted -= len(sequence.ids)
        if wanted <= 0:
            break
    return LoadedText(taken, dict(skipped))
