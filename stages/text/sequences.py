"""Token sequences of documents."""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from instruments.errors import DataError, some
from models.loading import vocabulary_size
from stages.text.batches import IGNORED, TokenSequence
from stages.text.chat import encode_conversation
from stages.text.config import DataConfig, list_sources, named_source
from stages.text.documents import Document, Split
from stages.text.sources import describe_emptiness, describe_source, read_documents


def encode_document(document: Document, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> TokenSequence:
    """Tokenize one document with its end token. Raises DataError: a conversation cannot be rendered or labelled."""
    if document.messages:
        # With these labels, only the assistant's turns count.
        completion = data.labels in {"completion", "generated"}
        ids, supervised = encode_conversation(document, tokenizer, completion=completion)
        labels = [id_ if counts else IGNORED for id_, counts in zip(ids, supervised, strict=True)]
        return TokenSequence(document.name, ids, labels)
    ids = encode_text(document.text, tokenizer, data.separator)
    return TokenSequence(document.name, ids, ids)


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
ALL_MASKED = "no token counts in the loss"
FIRST_ONLY = "the only label is at the first token, which nothing predicts"
CUT_OFF = "no token that counts is left of it where the text ends"


def find_fault(labels: Sequence[int]) -> str | None:
    """Why a sequence with these labels (not shifted) has no loss; None if it has one."""
    if len(labels) < 2:
        return TOO_SHORT
    if any(label != IGNORED for label in labels[1:]):
        return None
    return ALL_MASKED if labels[0] == IGNORED else FIRST_ONLY


def describe_skipped(skipped: Skipped) -> list[str]:
    """One sentence per fault, for tables and logs: number and first names of the skipped sequences."""
    return [
        f"skipped {len(names)} sequence{'' if len(names) == 1 else 's'} ({fault}: {some(names, separator=', ')})"
        for fault, names in skipped.items()
        if names
    ]


def describe_nothing_left(data: DataConfig, split: Split, skipped: Skipped) -> DataError:
    """The error for text without a usable sequence."""
    where = f"{split} text of {describe_source(data, split)}"
    if CUT_OFF in skipped:
        setting, tokens = ("tokens", data.tokens) if split == "calibration" else ("heldout_tokens", data.heldout_tokens)
        what = f"the text ends after {tokens} tokens, and none of them counts in the loss"
        also = " (in stage=train: train.tokens)" if split == "calibration" else ""
        return DataError(what, where=f"{where}, {skipped[CUT_OFF][0]}", do=f"a larger data.{setting}{also}")
    masked, shifted, short = (len(skipped.get(fault, ())) for fault in (ALL_MASKED, FIRST_ONLY, TOO_SHORT))
    if masked or shifted:
        what = f"every label is masked: none of {masked + shifted} sequences has a token that counts in the loss"
        if shifted:
            what += f"; in {shifted} of them {FIRST_ONLY}"
        return DataError(
            what,
            where=f"{where}, data.labels={data.labels}, data.max_length={data.max_length}",
            do=f"data.labels=full_sequence, or data.max_length={2 * data.max_length} if the answers begin after "
            "the cut",
        )
    if short:
        return DataError(f"none of {short} sequences has 2 tokens", where=where, do="name text that holds more")
    return describe_emptiness(data, split)


def require_embeddings(sequences: Iterable[TokenSequence], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError at a token that the tokenizer has and the model has not."""
    known = vocabulary_size(tokenizer)
    for sequence in sequences:
        if known is not None and (last := max(sequence.ids)) >= known:
            name = tokenizer.convert_ids_to_tokens(last)
            what = f"the tokenizer makes token {last}, {name!r}, and the model has {known}"
            do = "the tokenizer and the chat template of these weights, or text without this token"
            raise DataError(what, where=f"{sequence.name}, tokenizer {tokenizer.name_or_path}", do=do)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedText:
    """Usable sequences, and the names of the skipped ones."""

    sequences: list[TokenSequence]
    skipped: Skipped

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(sequence.ids) for sequence in self.sequences)


# Cache of one entry: the stages of a run share one DataConfig, so that its calibration split is tokenized once.
_last_calibration: list[tuple[DataConfig, str, LoadedText]] = []


def load_text(data: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split) -> LoadedText:
    """Read one split of the text as token sequences; deterministic. The splits share no document.

    With `data.labels=generated` the text is read unchanged: the answers of conversations have labels, and all plain
    text. `load_prompts` and `continue_prompts` read the generated text.

    Returns:
        Sequences of 2 to `data.max_length` tokens, each with a label that counts; at most `data.tokens` or
        `data.heldout_tokens` in all, the last cut to fit. Also the names of skipped sequences.

    Raises:
        DataError: the text cannot be read, or has no usable sequence.
    """
    key = f"{tokenizer.name_or_path} {data}"
    for last_data, last_key, text in _last_calibration:
        if split == "calibration" and last_data is data and last_key == key:
            return text
    mixed = data.kind == "mixture" and (split == "calibration" or data.heldout_path is None)
    text = mix_sources(data, tokenizer, split) if mixed else _load_source(data, tokenizer, split)
    if split == "calibration":
        _last_calibration[:] = [(data, key, text)]
    return text


def _load_source(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split, excluded: Collection[bytes] = frozenset()
) -> LoadedText:
    """The sequences of one source without the documents whose digests are `excluded`."""
    documents = (document for document in read_documents(data, split) if document.digest not in excluded)
    encoded = (encode_document(document, tokenizer, data) for document in documents)
    build = pack_documents if data.packing == "packed" else truncate_documents
    wanted = data.tokens if split == "calibration" else data.heldout_tokens
    text = select_usable(build(encoded, data.max_length, find_begin(tokenizer)), wanted)
    require_embeddings(text.sequences, tokenizer)
    for note in describe_skipped(text.skipped):
        logger.warning("%s text: %s", split, note)
    if not text.sequences:
        raise describe_nothing_left(data, split, text.skipped)
    source = describe_source(data, split)
    # Of the decoded text, because a short conversation is mostly what its template writes.
    characters = sum(len(tokenizer.decode(sequence.ids)) for sequence in text.sequences)
    if text.tokens > characters:
        message = "%s text: the tokenizer makes %d tokens of %d characters of %s: the model hardly knows its language"
        logger.warning(message, split, text.tokens, characters, source)
    logger.info("%s text: %d of %d tokens, %d sequences of %s", split, text.tokens, wanted, len(text.sequences), source)
    return text


def mix_sources(data: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split) -> LoadedText:
    """The sequences of all sources of a mixture, ordered by `interleave_shares`.

    Raises:
        DataError: a source cannot be read, or has no usable sequence.
    """
    sources = list_sources(data)
    excluded: Collection[bytes] = frozenset()
    if data.heldout_path is not None:
        excluded = {document.digest for document in read_documents(data, "heldout")}
    parts = list[LoadedText]()
    for number, source in enumerate(sources):
        with named_source(number):
            parts.append(_load_source(source.data, tokenizer, split, excluded))
    for source, part in zip(sources, parts, strict=True):
        wanted = source.data.tokens if split == "calibration" else source.data.heldout_tokens
        if part.tokens < 0.9 * wanted:
            message = "%s text: source %s has %d tokens of the %d that are its share: the mixture holds less of it"
            logger.warning(message, split, source.name, part.tokens, wanted)
        share = source.share * (data.tokens if split == "calibration" else data.heldout_tokens)
        if part.tokens > 1.1 * share:
            message = (
                "%s text: source %s has %d tokens, and its share is %.0f: less than one sequence of data.max_length"
            )
            logger.warning(message, split, source.name, part.tokens, share)
    order = interleave_shares([[len(found.ids) for found in part.sequences] for part in parts],
                              [source.share for source in sources])  # fmt: skip
    skipped: dict[str, list[str]] = defaultdict(list)
    for fault, names in (found for part in parts for found in part.skipped.items()):
        skipped[fault].extend(names)
    named = (replace(parts[part].sequences[number], source=sources[part].name) for part, number in order)
    return LoadedText([*named], dict(skipped))


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

    The last is cut to fit, and dropped if no label remains.
    """
    taken: list[TokenSequence] = []
    skipped: dict[str, list[str]] = defaultdict(list)
    for sequence in sequences:
        if fault := find_fault(sequence.labels):
            skipped[fault].append(sequence.name)
            continue
        fitting = sequence.cut(wanted)
        if find_fault(fitting.labels) is None:
            taken.append(fitting)
        elif not taken:
            skipped[CUT_OFF].append(sequence.name)
        wanted -= len(sequence.ids)
        if wanted <= 0:
            break
    return LoadedText(taken, dict(skipped))


def interleave_shares(sizes: Sequence[Sequence[int]], shares: Sequence[float]) -> list[tuple[int, int]]:
    """Order the sequences of several sources so that every prefix holds the sources by their shares.

    Args:
        sizes: tokens of each sequence, by source.
        shares: of the sources.
    Returns:
        Source and number of each sequence; the numbers of one source ascend.
    """
    # Sort by the position of a sequence's middle within its source, divided by the share.
    places = []
    for source, (lengths, share) in enumerate(zip(sizes, shares, strict=True)):
        end = 0
        for number, length in enumerate(lengths):
            places.append(((end + length / 2) / share, source, number))
            end += length
    return [(source, number) for _, source, number in sorted(places)]
