"""Tokenization of conversations with the tokenizer's chat template."""

import re
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from instruments.errors import DataError
from stages.text.config import Source
from stages.text.documents import Document, Message
from stages.text.template import Chat, alike, find_chat

Span = tuple[int, int]


def encode_conversation(
    document: Document, tokenizer: PreTrainedTokenizerBase, source: Source
) -> tuple[list[int], list[bool]]:
    """Render a conversation with the chat template and tokenize it.

    Returns:
        Token ids, and for each whether it counts in the loss: with `labels=full_sequence` all, otherwise only the
        assistant's turns, including their end tokens, without those that the record takes out.

    Raises:
        DataError: the tokenizer has no chat template, the template refuses the conversation or leaves out a part of
            it, or the assistant's turns cannot be located.
    """
    chat = find_chat(tokenizer, source, tools=bool(document.tools))
    text = chat.write(document)
    if source.labels == "full_sequence":
        return _tokenize(text, None, tokenizer)
    # Some templates mark the assistant's turns with {% generation %} ... {% endgeneration %}.
    marked = tokenizer.is_fast and re.search(r"\{%-?\s*generation\s*-?%\}", chat.template)
    if marked and all(message.get("train", True) for message in document.messages):
        encoded = tokenizer.apply_chat_template(
            list(document.messages),
            tools=list(document.tools) or None,
            chat_template=chat.template,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]
    spans = find_assistant_spans(document, text, chat) if tokenizer.is_fast else None
    if spans is None:
        what = "the rendered conversation does not show where the assistant's turns are"
        asked = "" if document.messages[0]["role"] != "assistant" else "begin the record with a question, or "
        do = f"{asked}{source.place}.labels=full_sequence"
        raise DataError(what, where=chat.describe(document), do=do)
    return _tokenize(text, spans, tokenizer)


def encode_prompt(
    document: Document, tokenizer: PreTrainedTokenizerBase, source: Source, opening: str = ""
) -> list[int]:
    """Token ids of a conversation without its last answer, up to the start of the assistant's turn; [] if none is left.

    With an `opening`, the ids end with it, as the beginning of the answer itself, behind a thought.
    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the conversation or leaves out a part.
    """
    messages = without_answer(document.messages)
    if not messages:
        return []
    chat = find_chat(tokenizer, source, tools=bool(document.tools))
    text = chat.write(replace(document, messages=messages), opened=True)
    if opening:
        answered = chat.render([*messages, {"role": "assistant", "content": opening.strip()}], document)
        before, said, _ = answered.rpartition(opening.strip())
        text = (before if said else text) + opening
    return _tokenize(text, None, tokenizer)[0]


def without_answer(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages before the last answer."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return messages


def find_assistant_spans(document: Document, text: str, chat: Chat) -> list[Span] | None:
    """Find the assistant's turns that count, including their end tokens, in a rendered conversation.

    A turn begins where the rendering of the messages before it, with generation prompt, ends, or where that opens what
    a finished turn lacks (Qwen3.5: a thought). The last one ends with the text; another with what the template appends
    to its content, found in the rendering up to this turn. A template may add text before the content of the last turn
    only (Qwen3: an empty thought), and behind the end of a whole text (Phi-3), but must keep the content itself.

    Returns:
        Character spans in `text`, the rendered conversation; None if a turn cannot be found.
    """
    spans = []
    ends = tuple(chat.tokenizer.all_special_tokens)
    for index, message in enumerate(document.messages):
        if message["role"] != "assistant" or not message.get("train", True):
            continue
        if not index:
            return None  # transformers renders no empty conversation
        before = document.messages[:index]
        opening, closed = chat.render(before, document, opened=True), chat.render([*before, message], document)
        first = min(alike(opening, text), alike(opening, closed))
        if first < alike(opening, chat.render(before, document)):
            return None
        place = start = first
        if index < len(document.messages) - 1:
            content = message["content"].strip()
            place, start = closed.find(content, first), text.find(content, first)
            # A match after `place` would be another turn with the same content.
            if place < 0 or not 0 <= start <= place:
                return None
        turn = closed[place:][: alike(closed[place:], text[start:])]
        if place + len(turn) < len(closed):
            turn = turn[: max((turn.rfind(end) + len(end) for end in ends if end in turn), default=0)]
            if not turn:
                return None
        if turn.rstrip().endswith(ends):
            turn = turn.rstrip()  # the model stops before white space that follows an end-of-turn token
        spans.append((first, start + len(turn)))
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
