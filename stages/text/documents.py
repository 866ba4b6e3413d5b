"""Documents before tokenization: records, passages, interleaved sources, the held-out split."""

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate, islice
from typing import Any, TypeVar

from instruments.errors import DataError
from stages.text.config import Source, Split

logger = logging.getLogger(__name__)

# Limits of one document, since text is not trusted: a tokenizer needs seconds and hundreds of MiB for a few million
# characters, and the chat template is rendered twice for each answer.
MAX_CHARACTERS = 2**18
MAX_MESSAGES = 512

# Fields of a message that hold text, in the order in which templates write them.
TEXT_FIELDS = ("reasoning_content", "thinking", "content")
# Fields that templates read to connect calls and results of tools.
NAMES = ("name", "tool_call_id")

# role, content; maybe further fields of text, tool_calls, names; and "train": False, if the loss leaves it out.
Message = dict[str, Any]


@dataclass(frozen=True)
class Document:
    """Plain text, or a conversation (`messages`, then `text` is empty). `name` is its place in the source."""

    name: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()  # their JSON schemas

    @property
    def digest(self) -> bytes:
        """8-byte hash of the content; copies of a document have the same, also with other line ends."""
        content = [self.messages, self.tools] if self.tools else self.messages
        if self.messages:
            return digest_of(json.dumps(content, sort_keys=True).replace(r"\r\n", r"\n"))  # as JSON writes line ends
        return digest_of(self.text.replace("\r\n", "\n").strip())


def digest_of(text: str) -> bytes:
    """8-byte hash of a text, the same on every machine."""
    return blake2b(text.encode(), digest_size=8).digest()


def read_record(record: object, where: str, source: Source) -> Document | None:
    """Read the conversation or the text of one record; None if it is empty or null. `where` is the record's place.

    An empty record with text in other columns is added to `source.without_text`.

    A record without the source's columns, or with empty ones, may have those of Alpaca (instruction, input, output), of
    Dolly (instruction, context, response), of ShareGPT (conversations) or a prompt and its completion. Columns system
    and history are read, too.

    Raises:
        DataError: there are no such columns, a value is no text and no conversation, two columns hold two texts for
            one place, or a message has a field that is not read.
    """
    columns = source.messages_column, source.text_column
    fields = record if isinstance(record, Mapping) else {}
    empty = not any(str(fields.get(column) or "").strip() for column in columns)
    known = _known_conversation(fields, where, source) if empty else None
    found = {columns[0]: known} if known or not fields.keys() & {*columns} else fields
    conversation, text = (found.get(column) for column in columns)
    if conversation:
        place = f"{where}, column {columns[0]}" if columns[0] in fields else where
        given = conversation if isinstance(conversation, list) else [conversation]
        messages = tuple(_read_message(one, f"{place}, message {n}", source) for n, one in enumerate(given, 1))
        system = _read_column(fields, ("system", "system_prompt"), where, source)
        if system and messages[0]["role"] == "system" and not messages[0]["content"].strip():
            messages = messages[1:]
        if system and messages and messages[0]["role"] == "system" and messages[0]["content"].strip() != system.strip():
            what = "a column and the first message hold two system prompts"
            raise DataError(what, where=where, do=_leave_out("system,system_prompt", source))
        if system and (not messages or messages[0]["role"] != "system"):
            messages = ({"role": "system", "content": _replace_surrogates(system)}, *messages)
        return Document(where, messages=messages, tools=_read_tools(fields, f"{where}, column tools"))
    if found is not fields:
        what = f"a record has neither column {columns[0]!r} nor column {columns[1]!r}"
        where += f"; its columns: {', '.join(map(str, fields)) or 'none'}" if isinstance(record, Mapping) else ""
        do = f"name a column of it: {source.place}.text_column= or {source.place}.messages_column="
        raise DataError(what, where=where, do=do)
    if not isinstance(text, str | None):
        what = f"column {columns[1]!r} holds {type(text).__name__}, not text"
        raise DataError(what, where=where, do=f"name a column of text: {source.place}.text_column=")
    if text and text.strip():
        return Document(where, _replace_surrogates(text))
    if others := [str(name) for name, value in fields.items() if isinstance(value, str) and value.strip()]:
        source.without_text.append(f"{where} with {', '.join(others)}")
    return None


def _known_conversation(record: Mapping[str, Any], where: str, source: Source) -> object:
    """The messages of a record with the columns of a well-known dataset; None: of none."""
    if record.get("conversations"):
        return record["conversations"]
    answers = [name for name in ("output", "completion", "response") if name in record]
    answer = _one_of(record, answers, where, source)
    said = None if "instruction" in source.ignored_fields else record.get("instruction")
    # In copies of Alpaca, `prompt` repeats instruction, input and output.
    repeated = isinstance(said, str) and said.strip() and said.strip() in str(record.get("prompt"))
    asked = ("instruction",) if repeated else ("instruction", "prompt")
    prompt = (_one_of(record, asked, where, source) if answers else None) or said
    if isinstance(prompt, list) and isinstance(answer, list):
        return prompt + answer
    if not isinstance(prompt, str) or not isinstance(answer, str | None) or not answers:
        return None
    if answer is None and record.keys() & {source.messages_column, source.text_column}:
        return None  # an empty record
    if more := _read_column(record, ("input", "context"), where, source):
        prompt = f"{prompt}\n\n{more}"
    turns = [] if "history" in source.ignored_fields else record.get("history") or []
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        what, do = "the history is no list of pairs of question and answer", _leave_out("history", source)
        raise DataError(what, where=f"{where}, column history", do=do)
    roles = ("user", "assistant")
    said = [text for turn in (*turns, (prompt, answer)) for text in turn]
    # Some rows of such datasets have no answer.
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(said) if text is not None]


def _one_of(record: Mapping[str, Any], names: Sequence[str], where: str, source: Source) -> Any:  # noqa: ANN401 - of JSON
    """The value of the only one of these columns that has one; None if none has. Raises DataError: two differ."""
    held = {name: record[name] for name in names if record.get(name) and name not in source.ignored_fields}
    held = {name: value for name, value in held.items() if not isinstance(value, str) or value.strip()}
    first, *others = [*held] or [""]
    if different := [name for name in others if held[name] != held[first]]:
        what = f"columns {first!r} and {different[0]!r} hold two texts for one place of the conversation"
        raise DataError(what, where=where, do=_leave_out(different[0], source))
    return held.get(first)


def _read_column(record: Mapping[str, Any], names: Sequence[str], where: str, source: Source) -> str:
    """The text of the only one of these columns that has one; "" if none has. Raises DataError: no text, or two."""
    value = _one_of(record, names, where, source)
    if not isinstance(value, str | None):
        name = next(name for name in names if record.get(name) == value)
        what = f"column {name!r}, which belongs to the conversation, holds {type(value).__name__}, not text"
        raise DataError(what, where=where, do=_leave_out(name, source))
    return value or ""


def _leave_out(fields: str, source: Source) -> str:
    return f"remove it, or leave it out: '{source.place}.ignored_fields=[{fields}]'"


def _join_parts(content: object, place: str) -> object:
    """Content in parts, as of OpenAI's API, as one text. Raises DataError: there is something else than text."""
    if not isinstance(content, list):
        return content
    texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if len(texts) < len(content):
        raise DataError("a message has parts that are no text", where=place, do="leave this conversation out")
    return "".join(texts)


# Roles of ShareGPT → those that chat templates know.
_ROLES = {"human": "user", "gpt": "assistant"}


def _read_message(message: object, place: str, source: Source) -> Message:
    given = message if isinstance(message, Mapping) else {}
    # Tables fill fields that a message lacks with null.
    fields = {key: value for key, value in given.items() if value not in (None, "", [], {})}
    for name in source.ignored_fields:
        fields.pop(name, None)
    role = fields.pop("role", None) or _ROLES.get(str(given.get("from")), fields.get("from"))
    content = fields.pop("content", None) or fields.pop("value", "" if "content" in given or "value" in given else None)
    content = _join_parts(content, place)
    fields.pop("from", None)
    read: Message = {"role": role, "content": content}
    if calls := _read_calls(fields, place):
        read |= {"content": content or "", "tool_calls": calls}
    if not isinstance(role, str) or not isinstance(read["content"], str):
        what = "a conversation is a list of messages with a role and a content"
        raise DataError(what, where=place, do='[{"role": "user", "content": "..."}]')
    if not _counts(fields, role, place, source):
        read["train"] = False
    read |= {name: fields.pop(name) for name in (*TEXT_FIELDS, *NAMES) if isinstance(fields.get(name), str)}
    if fields:
        what = f"a message has {', '.join(map(str, fields))}, which is not read"
        raise DataError(what, where=place, do=_leave_out(",".join(map(str, fields)), source))
    return {key: _replace_surrogates(value) for key, value in read.items()}


def _read_calls(fields: dict[str, Any], place: str) -> list[Message]:
    """Calls of tools, with their arguments as values; takes them out of `fields`."""
    calls = fields.pop("tool_calls", [])
    calls = [*(calls if isinstance(calls, list) else [calls]), *filter(None, [fields.pop("function_call", None)])]
    read = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        function = function if isinstance(function, Mapping) else {}
        arguments = function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(function.get("name"), str) or not isinstance(arguments, Mapping):
            what, do = "a tool call has a name, and arguments that are an object or JSON of one", "correct the record"
            raise DataError(what, where=place, do=do)
        named = {"id": call["id"]} if call.get("id") else {}
        read.append({**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return read


def _counts(fields: dict[str, Any], role: str, place: str, source: Source) -> bool:
    """Whether the loss may count a message, by its own words `weight` and `train`; takes them out of `fields`.

    Raises DataError: with the source's labels, the loss cannot do what they say.
    """
    said = {name: fields.pop(name) for name in ("weight", "train") if name in fields}
    answers = role == "assistant"
    for name, value in said.items():
        full = source.labels == "full_sequence"
        if value not in (0, 1) or (full and not value) or (not full and value and not answers):
            what = f"a message of role {role} has {name} {value}, which {source.place}.labels={source.labels} cannot do"
            do = f"{source.place}.labels={'completion' if full else 'full_sequence'}"
            do += f", or without it: '{source.place}.ignored_fields=[{name}]'"
            raise DataError(what, where=place, do=do)
    return all(said.values()) or not answers


def _read_tools(record: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    """The tools that a record offers: a list of JSON schemas, or JSON of one."""
    tools: Any = record.get("tools") or record.get("functions") or []
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except (ValueError, RecursionError):
        tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError("the tools are no list of JSON schemas", where=where, do="correct or remove the record")
    wrapped = tools if record.get("tools") else [{"type": "function", "function": function} for function in tools]
    return tuple(_replace_surrogates(wrapped))


def without_filled(row: Mapping[str, Any]) -> dict[str, Any]:
    """A table's row without the keys inside its columns that hold null: all rows of a column have the same keys."""
    return {column: _without_nulls(value) for column, value in row.items()}


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - of JSON
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _replace_surrogates(value: Any) -> Any:  # noqa: ANN401 - of JSON
    """Replace unpaired surrogates, which JSON allows and tokenizers reject, by question marks, also inside a value."""
    if isinstance(value, Mapping):
        return {_replace_surrogates(key): _replace_surrogates(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replace_surrogates(inner) for inner in value]
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


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
    ends = accumulate(sum(len(str(value)) for value in message.values()) for message in document.messages)
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
