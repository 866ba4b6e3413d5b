"""Documents before tokenization: records, passages, interleaved sources, the held-out split."""

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate, islice
from typing import TypeVar

from instruments.errors import DataError
from stages.text.config import Source, Split

logger = logging.getLogger(__name__)

# Limits of one document, since text is not trusted: a tokenizer needs seconds and hundreds of MiB for a few million
# characters, and the chat template is rendered twice for each answer.
MAX_CHARACTERS = 2**18
MAX_MESSAGES = 512

# Fields of messages that some templates write, in addition to the content.
UNREAD_FIELDS = ("tool_calls", "reasoning_content", "thinking")

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
        return digest_of(json.dumps(self.messages, sort_keys=True) if self.messages else self.text)


def digest_of(text: str) -> bytes:
    """8-byte hash of a text, the same on every machine."""
    return blake2b(text.encode(), digest_size=8).digest()


def read_record(record: object, where: str, source: Source) -> Document | None:
    """Read the conversation or the text of one record; None if it is empty or null. `where` is the record's place.

    Raises:
        DataError: neither column exists, or its value is no text and no conversation.
    """
    columns = source.messages_column, source.text_column
    if not isinstance(record, Mapping) or not record.keys() & {*columns}:
        what = f"a record has neither column {columns[0]!r} nor column {columns[1]!r}"
        where += f"; its columns: {', '.join(record) or 'none'}" if isinstance(record, Mapping) else ""
        do = f"name a column of it: {source.place}.text_column= or {source.place}.messages_column="
        raise DataError(what, where=where, do=do)
    conversation, text = (record.get(column) for column in columns)
    if conversation:
        return Document(where, messages=_read_messages(conversation, f"{where}, column {columns[0]}"))
    if not isinstance(text, str | None):
        what = f"column {columns[1]!r} holds {type(text).__name__}, not text"
        raise DataError(what, where=where, do=f"name a column of text: {source.place}.text_column=")
    return Document(where, _replace_surrogates(text)) if text and text.strip() else None


def _read_messages(conversation: object, where: str) -> tuple[Message, ...]:
    messages = []
    for number, message in enumerate(conversation if isinstance(conversation, list) else [conversation], start=1):
        fields = message if isinstance(message, Mapping) else {}
        role, content, place = fields.get("role"), fields.get("content"), f"{where}, message {number}"
        if unread := [name for name in UNREAD_FIELDS if fields.get(name)]:
            what = f"a message has {', '.join(unread)}, and only its role and content are read"
            do = "write it into the content, as the model should write it; or remove the field"
            raise DataError(what, where=place, do=do)
        if not isinstance(role, str) or not isinstance(content, str):
            what = "a conversation is a list of messages with a role and a content"
            raise DataError(what, where=place, do='[{"role": "user", "content": "..."}]')
        messages.append({"role": role, "content": _replace_surrogates(content)})
    return tuple(messages)


def _replace_surrogates(text: str) -> str:
    """Replace unpaired surrogates, which JSON allows and tokenizers reject, by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def bound_documents(documents: Iterable[Document]) -> Iterator[Document]:
    """Cut long text into documents of MAX_CHARACTERS, and shorten long conversations to their first messages."""
    for document in documents:
        if document.messages:
            yield _shorten(document)
        elif len(document.text) <= MAX_CHARACTERS:
            yield document
        else:
            parts = enumerate(cut_text(document.text, MAX_CHARACTERS), start=1)
            yield from (replace(document, name=f"{document.name}, part {n}", text=part) for n, part in parts)


def cut_text(text: str, longest: int) -> Iterator[str]:
    """Parts of at most `longest` characters that are not blank, cut at white space if possible."""
    first = 0
    while first < len(text):
        last = first + longest
        if last < len(text):
            last = max(text.rfind(" ", first + 1, last), text.rfind("\n", first + 1, last)) + 1 or last
        if part := text[first:last].strip():
            yield part
        first = last


def _shorten(document: Document) -> Document:
    ends = accumulate(len(message["content"]) + len(message["role"]) for message in document.messages)
    kept = max(1, sum(1 for end in islice(ends, MAX_MESSAGES) if end <= MAX_CHARACTERS))
    if kept < len(document.messages):
        logger.warning("%s: only the first %d of %d messages are read", document.name, kept, len(document.messages))
    return replace(document, messages=document.messages[:kept])


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
