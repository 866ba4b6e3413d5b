"""Conversations: the chat template, a rendering that holds every message whole, and its tokens."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from instruments.errors import DataError
from stages.text.config import PLAIN_TEMPLATE, Source
from stages.text.documents import TEXT_FIELDS, Document, Message
from stages.text.sources import find_template_file, read_template

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
# Stands for the content of message N; characters that no text has.
_MARK = "\ue000{}\ue001"

Span = tuple[int, int]


@dataclass(frozen=True)
class Chat:
    """A tokenizer, and the chat template with which it writes conversations."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    place: str  # node of the source's settings, for errors

    def write(self, document: Document, *, opened: bool = False) -> str:
        """The rendered conversation; `opened`: up to the start of the assistant's next turn.

        Raises DataError: the template refuses the conversation, or leaves out a message, a part of one, or the tools.
        """
        text = self.render(document.messages, document, opened=opened)
        written = _written_messages(self, tuple(message["role"] for message in document.messages), opened)
        if lost := find_lost(document, text, written):
            what = f"the chat template leaves out {lost}"
            do = f"{self.place}.chat_template={PLAIN_TEMPLATE}, or =FILE of a template that writes it"
            do += "; or roles of the name system, user, assistant and tool"
            raise DataError(what, where=self.describe(document), do=do)
        return text

    def render(self, messages: Sequence[Message], document: Document, *, opened: bool = False) -> str:
        """The rendering of these messages, with the document's tools. Raises DataError: the template refuses them."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(document.tools) or None,
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=opened,
                )
            )
        except Exception as error:  # a template is a foreign program, and raises errors of any type
            what, do = f"the chat template refuses the conversation: {error}", "correct or remove the record"
            raise DataError(what, where=self.describe(document), do=do) from error

    def describe(self, document: Document) -> str:
        """The document and the tokenizer, for errors."""
        return f"{document.name}, tokenizer {self.tokenizer.name_or_path}"


@lru_cache(maxsize=256)
def _written_messages(chat: Chat, roles: tuple[str, ...], opened: bool) -> set[int]:
    """Numbers of the messages of these roles that the template writes; all if it refuses them."""
    marked = tuple({"role": role, "content": _MARK.format(number)} for number, role in enumerate(roles))
    try:
        return {*map(int, re.findall("\ue000([0-9]+)\ue001", chat.render(marked, Document(""), opened=opened)))}
    except DataError:  # such as a template that reads contents as JSON
        return {*range(len(roles))}


def find_lost(document: Document, text: str, written: set[int]) -> str | None:
    """What a rendering does not hold, if there is anything: a message that is not `written`, or a part of one.

    White space does not count, and parts may be written as in JSON. Each part is looked for in what the longer ones
    leave of the text, so that one text in two messages has to be there twice.
    """
    for number, message in enumerate(document.messages):
        if number not in written and any(True for _ in _parts(message)):
            return f"all of message {number + 1} (role {message['role']!r})"
    parts = [
        (part, f"{what} of message {number + 1} (role {message['role']!r})")
        for number, message in enumerate(document.messages)
        for what, part in _parts(message)
    ]
    functions = [tool.get("function", tool) for tool in document.tools]
    fields = ("name", "description")
    parts += [(str(function[name]), "the tools") for function in functions for name in fields if function.get(name)]
    left = _squeeze(text)
    for part, what in sorted(parts, key=lambda pair: len(_squeeze(pair[0])), reverse=True):
        spelling = next((spelling for spelling in _spellings(part) if spelling in left), None)
        if spelling is None:
            return what
        left = left.replace(spelling, "\0", 1) if spelling else left
    return None


def _parts(message: Message) -> Iterator[tuple[str, str]]:
    """The texts of a message, and what each is."""
    yield from ((f"the {field}", message[field]) for field in TEXT_FIELDS if message.get(field))
    for call in message.get("tool_calls", ()):
        yield "a tool call", call["function"]["name"]
        yield from (("a tool call", leaf) for leaf in _leaves(call["function"]["arguments"]))


def _leaves(value: object) -> Iterator[str]:
    """All keys, texts and numbers of a value, as text."""
    if isinstance(value, Mapping):
        yield from map(str, value)
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


def _squeeze(text: str) -> str:
    """The text without white space, which templates may trim or add."""
    return "".join(text.split())


def _spellings(text: str) -> Iterator[str]:
    """How a text may be written, without white space: as it is, or inside quotes, once or twice."""
    yield _squeeze(text)
    for ascii_only in (False, True):
        quoted = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        yield _squeeze(quoted)
        yield _squeeze(json.dumps(quoted, ensure_ascii=ascii_only)[1:-1])


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
    if (file := find_template_file(source)) is not None:
        return read_template(file, source)
    what = f"the tokenizer has no {'default' if chosen is None else repr(chosen)} chat template for the conversations"
    do = f"{source.place}.chat_template= of: {', '.join([*named, PLAIN_TEMPLATE])}, or =FILE; or plain text"
    raise DataError(what, where=f"tokenizer {tokenizer.name_or_path}", do=do)


def encode_conversation(
    document: Document, tokenizer: PreTrainedTokenizerBase, source: Source
) -> tuple[list[int], list[bool]]:
    """Render a conversation with the chat template and tokenize it.

    Returns:
        Token ids, and for each whether it counts in the loss: with `labels=full_sequence` all, otherwise only the
        assistant's turns, including their end tokens.

    Raises:
        DataError: the tokenizer has no chat template, the template refuses the conversation or leaves out a part of
            it, or the assistant's turns cannot be located.
    """
    chat = find_chat(tokenizer, source, tools=bool(document.tools))
    text = chat.write(document)
    if source.labels == "full_sequence":
        return _tokenize(text, None, tokenizer)
    spans = find_assistant_spans(document, text, chat) if tokenizer.is_fast else None
    if spans is None:
        what = "the rendered conversation does not show where the assistant's turns are"
        do = f"begin the record with a question, or {source.place}.labels=full_sequence"
        raise DataError(what, where=chat.describe(document), do=do)
    return _tokenize(text, spans, tokenizer)


def encode_prompt(document: Document, tokenizer: PreTrainedTokenizerBase, source: Source) -> list[int]:
    """Token ids of a conversation without its last answer, up to the start of the assistant's turn; [] if none is left.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the conversation or leaves out a part.
    """
    messages = document.messages
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        return []
    chat = find_chat(tokenizer, source, tools=bool(document.tools))
    return _tokenize(chat.write(replace(document, messages=messages), opened=True), None, tokenizer)[0]


def find_assistant_spans(document: Document, text: str, chat: Chat) -> list[Span] | None:
    """Find the assistant's turns, including their end tokens, in a rendered conversation.

    A turn begins where the rendering of the messages before it, with generation prompt, ends. The last one ends with
    the text; another with what the template appends to its content, found in the rendering up to this turn. A template
    may add text before the content of the last turn only (Qwen3: an empty thought), but must keep the content itself.

    Returns:
        Character spans in `text`, the rendered conversation; None if a turn cannot be found.
    """
    spans = []
    ends = tuple(chat.tokenizer.all_special_tokens)
    for index, message in enumerate(document.messages):
        if message["role"] != "assistant":
            continue
        if not index:
            return None  # transformers renders no empty conversation
        opening = chat.render(document.messages[:index], document, opened=True)
        closed = chat.render(document.messages[: index + 1], document)
        if not (text.startswith(opening) and closed.startswith(opening)):
            return None
        is_last = index == len(document.messages) - 1
        place = len(opening) if is_last else closed.find(message["content"].strip(), len(opening))
        turn = closed[place:]
        if turn.rstrip().endswith(ends):
            turn = turn.rstrip()  # the model stops before white space that follows an end-of-turn token
        start = text.find(turn, len(opening))
        # A match after `place` would be another turn with the same content.
        if place < 0 or not 0 <= start <= place:
            return None
        spans.append((len(opening), start + len(turn)))
    return spans


def _tokenize(
    text: str, spans: Sequence[Span] | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
    """Token ids, and whether they are in one of the spans; None: all count."""
    # The template has already written the special tokens.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=spans is not None, verbose=False)
    ids = list(encoded["input_ids"])
    if spans is None:
        return ids, [True] * len(ids)
    # A token across a turn's border counts: it holds the turn's first or last character.
    places = encoded["offset_mapping"]
    return ids, [any(start < last and first < end for first, last in spans) for start, end in places]
