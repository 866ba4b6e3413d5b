"""Tokenization of conversations with the tokenizer's chat template."""

import re
from collections.abc import Sequence
from dataclasses import replace

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from instruments.errors import DataError
from stages.text.config import Source
from stages.text.documents import Document

Span = tuple[int, int]

# Before a template that writes today's date: tomorrow it would give other tokens, and a killed scan could not go on.
FIXED_DATE = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro %}\n"


def encode_conversation(
    document: Document, tokenizer: PreTrainedTokenizerBase, source: Source
) -> tuple[list[int], list[bool]]:
    """Render a conversation with the chat template and tokenize it.

    Returns:
        Token ids, and for each whether it counts in the loss: with `labels=full_sequence` all, otherwise only the
        assistant's turns, including their end tokens.

    Raises:
        DataError: the tokenizer has no chat template, the template refuses the conversation, or the assistant's turns
            cannot be located.
    """
    text = _render_document(document, tokenizer)
    if source.labels == "full_sequence":
        return _tokenize(text, None, tokenizer)
    template = find_template(tokenizer)
    # Some templates mark the assistant's turns with {% generation %} ... {% endgeneration %}.
    if tokenizer.is_fast and re.search(r"\{%-?\s*generation\s*-?%\}", template):
        encoded = tokenizer.apply_chat_template(
            list(document.messages),
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]
    spans = find_assistant_spans(document, text, tokenizer) if tokenizer.is_fast else None
    if spans is None:
        what = "the rendered conversation does not show where the assistant's turns are"
        do = f"begin the record with a question, or {source.place}.labels=full_sequence"
        raise DataError(what, where=_describe(document, tokenizer), do=do)
    return _tokenize(text, spans, tokenizer)


def encode_prompt(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a conversation without its last answer, up to the start of the assistant's turn; [] if none is left.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the conversation.
    """
    messages = document.messages
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        return []
    text = _render_document(replace(document, messages=messages), tokenizer, add_generation_prompt=True)
    return _tokenize(text, None, tokenizer)[0]


def find_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template, with a fixed date instead of today's. Raises DataError: the tokenizer has none."""
    if not tokenizer.chat_template:
        what = "the text is conversations, and the tokenizer has no chat template to render them with"
        do = "an instruction-tuned model, or plain text: data.text_column="
        raise DataError(what, where=f"tokenizer {tokenizer.name_or_path}", do=do)
    template = str(tokenizer.get_chat_template())
    return FIXED_DATE + template if "strftime_now" in template else template


def find_assistant_spans(document: Document, text: str, tokenizer: PreTrainedTokenizerBase) -> list[Span] | None:
    """Find the assistant's turns, including their end tokens, in a rendered conversation.

    A turn begins where the rendering of the messages before it, with generation prompt, ends. It ends with what the
    template appends to its content, found in the rendering up to this turn. A template may add text before the content
    of the last turn only (Qwen3: an empty thought), but must keep the content itself.

    Returns:
        Character spans in `text`, the rendered conversation; None if a turn cannot be found.
    """
    spans = []
    for index, message in enumerate(document.messages):
        if message["role"] != "assistant":
            continue
        if not index:
            return None  # transformers renders no empty conversation
        before, through = (replace(document, messages=document.messages[:end]) for end in (index, index + 1))
        opening, closed = _render(before, tokenizer, add_generation_prompt=True), _render(through, tokenizer)
        if not (text.startswith(opening) and closed.startswith(opening)):
            return None
        place = closed.find(message["content"].strip(), len(opening))
        turn = closed[place:]
        if turn.rstrip().endswith(tuple(tokenizer.all_special_tokens)):
            turn = turn.rstrip()  # the model stops before white space that follows an end-of-turn token
        start = text.find(turn, len(opening))
        # A match after `place` would be another turn with the same content.
        if place < 0 or not 0 <= start <= place:
            return None
        spans.append((len(opening), start + len(turn)))
    return spans


ROLES = frozenset({"system", "user", "assistant", "tool"})


def _render_document(document: Document, tokenizer: PreTrainedTokenizerBase, **options: bool) -> str:
    """The rendered conversation. Raises DataError: the template leaves out a message, for a role that it does not know.

    Templates may change a message's white space or quotes, so that only its longest word is looked for.
    """
    text = _render(document, tokenizer, **options)
    for message in document.messages:
        longest = max(re.findall(r"\w+", message["content"]), key=len, default="")
        if message["role"] not in ROLES and longest not in text:
            what = f"the chat template leaves out the messages of role {message['role']!r}"
            do = "rename the roles to system, user, assistant and tool"
            raise DataError(what, where=_describe(document, tokenizer), do=do)
    return text


def _render(document: Document, tokenizer: PreTrainedTokenizerBase, **options: bool) -> str:
    template, messages = find_template(tokenizer), list(document.messages)
    try:
        return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options))
    except TemplateError as error:
        what, do = f"the chat template refuses the conversation: {error}", "correct or remove the record"
        raise DataError(what, where=_describe(document, tokenizer), do=do) from error


def _describe(document: Document, tokenizer: PreTrainedTokenizerBase) -> str:
    return f"{document.name}, tokenizer {tokenizer.name_or_path}"


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
