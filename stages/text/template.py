"""Chat templates: which one, and a rendering that holds every message whole."""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from instruments.errors import DataError
from stages.text.config import PLAIN_TEMPLATE, Source
from stages.text.documents import TEXT_FIELDS, Document, Message
from stages.text.sources import describe_missing_template, find_template_file, read_template

# Before a template that writes today's date: tomorrow it would give other tokens, and a killed scan could not go on.
FIXED_DATE = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro %}\n"
# Roles and contents in plain text.
PLAIN = (
    "{% if tools %}tools: {{ tools | tojson }}\n\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.thinking }}{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ROLES = frozenset({"system", "user", "assistant", "tool"})
# Stands for the content of message N; characters that no text has.
_MARK = "\ue000{}\ue001"


class RenderingError(DataError):
    """A conversation that the chat template does not write whole."""


@dataclass(frozen=True)
class Chat:
    """A tokenizer, and the chat template with which it writes conversations."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    place: str  # node of the source's settings, for errors

    def write(self, document: Document, *, opened: bool = False) -> str:
        """The rendered conversation; `opened`: up to the start of the assistant's next turn.

        Raises:
            RenderingError: the template leaves out a message, a part of one, or the tools.
            DataError: the template refuses the conversation.
        """
        text = self.render(document.messages, document, opened=opened)
        if not self._is_plainly_whole(document, text, opened):
            for what, role in self._find_missing(document, text, opened):
                self._refuse(what, role, document)
        return text

    def render(self, messages: Sequence[Message], document: Document, *, opened: bool = False) -> str:
        """The rendering of these messages, with the document's tools. Raises DataError: the template refuses them."""
        try:
            return self.apply(messages, document.tools, opened)
        except Exception as error:  # a template is a foreign program, and raises errors of any type
            what, do = f"the chat template refuses the conversation: {error}", "correct or remove the record"
            raise DataError(what, where=self.describe(document), do=do) from error

    def describe(self, document: Document) -> str:
        """The document and the tokenizer, for errors."""
        return f"{document.name}, tokenizer {self.tokenizer.name_or_path}"

    def apply(self, messages: Sequence[Message], tools: Sequence[Any], opened: bool) -> str:
        """The rendering. Raises what the template raises."""
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=opened,
            )
        )

    def _is_plainly_whole(self, document: Document, text: str, opened: bool) -> bool:
        """Whether the template only puts the contents, or those without white space around them, in their places.

        False if it changes contents, such as thoughts, or if there is more to write.
        """
        messages = document.messages
        if document.tools or any(message.keys() - {"role", "content", "train"} for message in messages):
            return False
        parts = _frame(self, tuple(message["role"] for message in messages), opened)
        if {*map(int, parts[1::2])} != {*range(len(messages))}:
            return False
        for change in (str, str.strip):
            contents = [change(messages[int(number)]["content"]) for number in parts[1::2]]
            if text == "".join(part for pair in zip(parts[::2], [*contents, ""], strict=True) for part in pair):
                return True
        return False

    def _find_missing(self, document: Document, text: str, opened: bool) -> Iterator[tuple[str, str]]:
        """What is not written in its own place, and its role."""
        for number, message in enumerate(document.messages):
            place = self._place(document, number, text, opened)
            for what, is_there in _parts(message, place):
                if not is_there:
                    yield f"{what} of message {number + 1}", message["role"]
        if document.tools:
            try:
                without = self.apply(document.messages, (), opened)
            except Exception:  # noqa: BLE001
                without = ""
            place = _difference(text, without)
            if not all(_holds_value(place, tool) or _holds_leaves(place, _named(tool)) for tool in document.tools):
                yield "the tools", "system"

    def _place(self, document: Document, number: int, text: str, opened: bool) -> str:
        """The part of the rendering that changes with this message's contents; empty if there is none."""
        marked = list(document.messages)
        marked[number] = {"role": marked[number]["role"], "content": (mark := _MARK.format(number))}
        try:
            other = self.apply(marked, document.tools, opened)
        except Exception:  # noqa: BLE001 - such as a template that reads the content as JSON
            return text
        return _difference(text, other) if mark in other else ""

    def _refuse(self, what: str, role: str, document: Document) -> None:
        do = f"{self.place}.chat_template={PLAIN_TEMPLATE}, or =FILE of a template that writes it"
        if role not in ROLES:
            do = f"rename the roles to system, user, assistant and tool; or {do}"
        what = f"the chat template leaves out {what} (role {role!r})"
        raise RenderingError(what, where=self.describe(document), do=do)


@lru_cache(maxsize=256)
def _frame(chat: Chat, roles: tuple[str, ...], opened: bool) -> list[str]:
    """A rendering around the contents: text, number of a message, text ...; without numbers if it is refused."""
    marked = [{"role": role, "content": _MARK.format(number)} for number, role in enumerate(roles)]
    try:
        return re.split("\ue000([0-9]+)\ue001", chat.apply(marked, (), opened))
    except Exception:  # noqa: BLE001 - `render` reports it
        return [""]


def find_chat(tokenizer: PreTrainedTokenizerBase, source: Source, *, tools: bool = False) -> Chat:
    """The tokenizer with the source's chat template, which writes a fixed date instead of today's.

    Raises DataError: the tokenizer has no template of this name, or several and no default, and there is no such file.
    """
    template = _find_template(tokenizer, source, tools)
    return Chat(tokenizer, FIXED_DATE + template if "strftime_now" in template else template, source.place)


def _find_template(tokenizer: PreTrainedTokenizerBase, source: Source, tools: bool) -> str:
    own, chosen = tokenizer.chat_template or {}, source.chat_template
    named: Mapping[str, str] = own if isinstance(own, dict) else {"default": own}
    if chosen == PLAIN_TEMPLATE:
        return PLAIN
    wanted = [chosen] if chosen is not None else ["tool_use"] * tools + ["default"]
    if found := next((name for name in wanted if name in named), None):
        return named[found]
    where, setting = f"tokenizer {tokenizer.name_or_path}", f"{source.place}.chat_template"
    if (file := find_template_file(source)) is not None:
        return read_template(file, source)
    if chosen is not None:
        what, do = (
            f"the tokenizer has no chat template {chosen!r}",
            f"{setting}= of: {', '.join([*named, PLAIN_TEMPLATE])}",
        )
        raise DataError(what, where=where, do=do)
    if named:
        what, do = "the tokenizer has several chat templates and no default", f"{setting}= of: {', '.join(named)}"
        raise DataError(what, where=where, do=do)
    raise describe_missing_template(source, where)


def _parts(message: Message, place: str) -> Iterator[tuple[str, bool]]:
    """What a message holds, and whether it is written in this place, each text in a part of its own."""
    rest = _squeeze(place)
    fields = [field for field in TEXT_FIELDS if message.get(field)]
    for field in sorted(fields, key=lambda field: -len(message[field])):
        spelling = next((spelling for spelling in _spellings(message[field]) if spelling in rest), None)
        is_there = spelling is not None or (len(fields) == 1 and _holds_json(place, message[field]))
        rest = rest.replace(spelling or "", "\0", 1)
        yield f"the {field}" if place else "all", is_there
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = function.get("arguments", {})
        written = _holds_value(place, arguments) or _holds_leaves(place, arguments)
        yield "a tool call", _holds_text(place, function["name"]) and written


def _difference(text: str, other: str) -> str:
    """The part of a text between what begins and what ends another one, too."""
    first = alike(text, other)
    last = alike(text[::-1], other[::-1])
    return text[first : max(first, len(text) - last)]


def alike(text: str, other: str) -> int:
    """The number of characters with which both texts begin; by halving."""
    return bisect_left(range(1, len(other) + 1), True, key=lambda n: text[:n] != other[:n])


def _squeeze(text: str) -> str:
    """The text without white space, which templates may trim or add."""
    return "".join(text.split())


def _spellings(text: str) -> list[str]:
    """How a text may be written, without white space: as it is, or inside quotes."""
    return [_squeeze(text), *(_squeeze(json.dumps(text, ensure_ascii=ascii)[1:-1]) for ascii in (False, True))]


def _holds_text(place: str, text: str) -> bool:
    """Whether a text is written there."""
    squeezed = _squeeze(place)
    return any(spelling in squeezed for spelling in _spellings(text))


def _holds_json(place: str, text: str) -> bool:
    """Whether a text that is JSON is written there as other JSON of the same value."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict | list) and _holds_value(place, value)


def _holds_value(place: str, value: object) -> bool:
    """Whether JSON of this value is written there."""
    decoder = json.JSONDecoder()
    for start in re.finditer(r"[\[{\"]", place):
        try:
            found = decoder.raw_decode(place, start.start())[0]
            if found == value or (isinstance(found, str) and json.loads(found) == value):
                return True
        except (ValueError, RecursionError):
            continue
    return False


def _holds_leaves(place: str, value: object) -> bool:
    """Whether all keys and single values of a value are written there."""
    if isinstance(value, Mapping):
        return all(_holds_text(place, str(key)) and _holds_leaves(place, inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(_holds_leaves(place, inner) for inner in value)
    if isinstance(value, str):
        return _holds_text(place, value)
    return any(_squeeze(spelling) in place for spelling in {json.dumps(value), str(value)})


def _named(tool: Mapping[str, Any]) -> list[str]:
    """Name and description of a tool."""
    function = tool.get("function", tool)
    return [str(function[key]) for key in ("name", "description") if function.get(key)]
