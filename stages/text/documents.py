"""Documents before tokenization: records, passages, interleaved sources, the held-out split."""

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate, islice
from typing import Literal, TypeVar

from instruments.errors import DataError
from stages.text.config import DataConfig

logger = logging.getLogger(__name__)

# Limits of one document, since text is not trusted: a tokenizer needs seconds and hundreds of MiB for a few million
# characters, and the chat template is rendered twice for each answer.
MAX_CHARACTERS = 2**18
MAX_MESSAGES = 512

# Fields of messages that some templates write, in addition to the content, and what they hold.
UNREAD_FIELDS = {"tool_calls": "calls", "reasoning_content": "thoughts", "thinking": "thoughts"}

Split = Literal["calibration", "heldout"]
Message = dict[str, str]


@dataclass(frozen=True)
class Document:
    """Plain text, or a conversation (`messages`, then `text` is empty). `name` is its place in the source."""

    name: str
    text: str = ""
    messages: tuple[Message, ...] = ()

    @property
    def digest(self) -> bytes:
        """8-byte hash of the content; copies of a document have the same."""
        content = json.dumps(self.messages, sort_keys=True) if self.messages else self.text
        return blake2b(content.encode(), digest_size=8).digest()


def read_record(record: object, where: str, data: DataConfig) -> Document | None:
    """Read the conversation or the text of one record; None if it is empty or null. `where` is the record's place.

    Raises:
        DataError: neither column exists, or its value is no text and no conversation.
    """
    if not isinstance(record, Mapping):
        what = f"a record is {_kind(record)}, not an object"
        raise DataError(what, where=where, do=f'one JSON object a line: {{"{data.text_column}": "..."}}')
    conversation = record.get(data.messages_column)
    if conversation is not None and (conversation != [] or data.text_column not in record):
        messages = _read_messages(conversation, f"{where}, column {data.messages_column}")
        return Document(where, messages=messages) if messages else None
    if data.text_column not in record:
        what = f"a record has neither column {data.messages_column!r} nor column {data.text_column!r}"
        do = "name the column: data.text_column= or data.messages_column="
        raise DataError(what, where=f"{where}; its columns: {', '.join(record) or 'none'}", do=do)
    text = record[data.text_column]
    if text is None:
        return None
    if not isinstance(text, str):
        what = f"column {data.text_column!r} holds {_kind(text)}, not text"
        raise DataError(what, where=where, do="name a column of text: data.text_column=")
    return Document(where, _replace_surrogates(text)) if text.strip() else None


def bound_documents(documents: Iterable[Document]) -> Iterator[Document]:
    """Cut longer text into documents of at most MAX_CHARACTERS; shorten longer conversations to their first messages.

    Raises:
        DataError: the first message of a conversation exceeds the limit.
    """
    for document in documents:
        if document.messages:
            yield _shorten(document)
        elif len(document.text) <= MAX_CHARACTERS:
            yield document
        else:
            parts = cut_text(document.text, MAX_CHARACTERS)
            yield from (replace(document, name=f"{document.name}, part {n}", text=part) for n, part in parts)


def cut_text(text: str, longest: int) -> Iterator[tuple[int, str]]:
    """Non-blank, numbered parts of at most `longest` characters, cut at white space if possible."""
    first = number = 0
    while first < len(text):
        last = first + longest
        if last < len(text):
            last = max(text.rfind(" ", first + 1, last), text.rfind("\n", first + 1, last)) + 1 or last
        if part := text[first:last].strip():
            number += 1
            yield number, part
        first = last


def _shorten(document: Document) -> Document:
    ends = accumulate(len(message["content"]) + len(message["role"]) for message in document.messages)
    kept = sum(1 for end in islice(ends, MAX_MESSAGES) if end <= MAX_CHARACTERS)
    if kept == len(document.messages):
        return document
    if not kept:
        what = f"the first message is longer than {MAX_CHARACTERS:,} characters"
        raise DataError(what, where=document.name, do="shorten or remove the record")
    logger.warning("%s: only the first %d of %d messages are read", document.name, kept, len(document.messages))
    return replace(document, messages=document.messages[:kept])


def _read_messages(value: object, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        what = f"a conversation is {_kind(value)}, not a list"
        do = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        raise DataError(what, where=where, do=do)
    return tuple(_read_message(message, f"{where}, message {number}") for number, message in enumerate(value, start=1))


def _read_message(message: object, where: str) -> Message:
    fields = message if isinstance(message, Mapping) else {}
    role, content = fields.get("role"), fields.get("content")
    for name, them in UNREAD_FIELDS.items():
        if fields.get(name):
            what = f"a message has {name}, and only its role and content are read"
            do = f"write the {them} into the content, as the model should write them; or remove the field"
            raise DataError(what, where=where, do=do)
    if not isinstance(role, str) or not isinstance(content, str):
        what = "a message needs a role and a content, both text"
        raise DataError(what, where=where, do='{"role": "user", "content": "..."}')
    return {"role": role, "content": _replace_surrogates(content)}


def _replace_surrogates(text: str) -> str:
    """Replace unpaired surrogates, which JSON allows and tokenizers reject, by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _kind(value: object) -> str:
    """The type of a JSON value in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def cut_passages(lines: Iterable[str], shortest: int, longest: int) -> Iterator[tuple[int, str]]:
    """Cut text at the first blank line after `shortest` characters, or at the first line end after `longest`.

    Yields the number of each passage's first line, counted from 1, and its text without leading blank lines and
    trailing white space.
    """
    passage: list[str] = []
    length = first = 0
    for number, line in enumerate(lines, start=1):
        blank = not line.strip()
        if not passage and blank:
            continue
        first = first if passage else number
        passage.append(line)
        length += len(line)
        if length >= longest or (length >= shortest and blank):
            yield first, "".join(passage).rstrip()
            passage, length = [], 0
    if passage:
        yield first, "".join(passage).rstrip()


Item = TypeVar("Item")


def interleave(sources: Iterable[Iterable[Item]]) -> Iterator[Item]:
    """One item of each source in turn, until all are empty. A source is not read before its first turn."""
    waiting = deque(iter(source) for source in sources)
    while waiting:
        source = waiting.popleft()
        for item in source:
            yield item
            waiting.append(source)
            break


def is_heldout(digest: bytes, share: float) -> bool:
    """Whether an 8-byte digest falls into the held-out `share`; the same on every machine."""
    return int.from_bytes(digest, "big") < share * 2**64


def take_share(documents: Iterable[Document], split: Split, share: float) -> Iterator[Document]:
    """The documents of one split, chosen by content, so that copies of a document are in the same split."""
    for document in documents:
        if is_heldout(document.digest, share) == (split == "heldout"):
            yield document


def leave_out_copies(documents: Iterable[Document], heldout: Iterable[Document]) -> Iterator[Document]:
    """The documents that do not also occur in the held-out text."""
    known = {document.digest for document in heldout}
    return (document for document in documents if document.digest not in known)
