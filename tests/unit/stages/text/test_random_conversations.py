"""Random conversations and templates of every kind in use: each content is in the text, or the record is refused."""

import json
import random
from collections import Counter

import pytest

from instruments.errors import DataError
from stages.text.config import Source
from stages.text.documents import read_record
from stages.text.template import find_chat

ALTERNATE = (
    "{% set said = messages | rejectattr('role', 'equalto', 'system') | list %}{% for m in said %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% endfor %}"
)
SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim + '\n\n' }}{% endif %}"
EACH, END = "{% for m in messages %}", "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
IF, ELIF, FI = "{{% if m['role'] == '{}' %}}", "{{% elif m['role'] == '{}' %}}", "{% endif %}"
TEXT = "{{ '<|' + m['role'] + '|>' + m['content'] + eos_token + '\n' }}"
TRIMMED = TEXT.replace("m['content']", "m['content'] | trim")
CALLS = "{% for c in m['tool_calls'] or [] %}{{ '<call>' + c['function'] | tojson + '</call>' }}{% endfor %}"
TOOLS = "{% for t in tools or [] %}{{ t | tojson(indent=2) }}{% endfor %}"
TEMPLATES = {
    "marked turns": EACH + TEXT + END,
    "trimmed turns": EACH + TRIMMED + END,
    "system inside the first question": ALTERNATE + EACH + IF.format("user") + "{{ '[INST] ' }}"
    "{% if loop.index0 == 1 and messages[0]['role'] == 'system' %}{{ '<<SYS>>' + messages[0]['content'] + '<</SYS>>' }}"
    "{% endif %}{{ m['content'] | trim + ' [/INST]' }}" + ELIF.format("assistant")
    + "{{ m['content'] + eos_token }}" + FI + "{% endfor %}",
    "no system": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + EACH
    + TRIMMED.replace("m['role']", "('model' if m['role'] == 'assistant' else m['role'])") + END,
    "system left out": ALTERNATE + EACH + IF.format("system") + "{% else %}" + TRIMMED + FI + END,
    "names": SYSTEM + EACH + IF.format("user") + "{{ 'USER: ' + m['content'] | trim + '\n' }}"
    + ELIF.format("assistant") + "{{ 'ASSISTANT: ' + m['content'] | trim + eos_token + '\n' }}" + FI + "{% endfor %}",
    "headings": SYSTEM + EACH + IF.format("user") + "{{ '### Instruction:\n' + m['content'] + '\n\n' }}"
    + ELIF.format("assistant") + "{{ '### Response:\n' + m['content'] + '\n\n' }}" + FI + "{% endfor %}",
    "tools and calls": TOOLS + EACH + TEXT.replace("m['content']", "(m['content'] or '')") + CALLS + END,
    "calls without tools": EACH + TEXT + CALLS + END,
    "thoughts left out": EACH + TEXT.replace("m['content']", "m['content'].split('</think>')[-1] | trim") + END,
    "thoughts of the last answer": EACH + "{% set now = m['content'] %}{% if not loop.last %}"
    "{% set now = now.split('</think>')[-1] %}{% endif %}" + TEXT.replace("m['content']", "now") + END,
    "the last turns": "{% set messages = messages[-4:] %}" + EACH + TEXT + END,
}  # fmt: skip
WORDS = ["alpha", "user", "assistant", "system", "tool", "a", "7", '{"x": 1}', "<think>", "</think>", "\n", "", "\n\n"]
WORDS += ["'q'", "&", "<", "é", "龙", "🦞", "[INST]", "<|user|>", "### Response:"]
CALL = {"function": {"name": "weigh", "arguments": '{"a": 1, "b": "x y"}'}}
TOOL = {"type": "function", "function": {"name": "weigh", "description": 'Weighs a "thing".', "parameters": {}}}


def draw_content(rng):
    words = "".join(rng.choice(WORDS) + rng.choice([" ", "", "\n"]) for _ in range(rng.choice([0, 1, 1, 2, 5, 30])))
    return f"<think>{draw_content(rng)}</think>\n{words}" if rng.random() < 0.15 else words


def draw_record(rng):
    messages = [{"role": "system", "content": draw_content(rng)}] if rng.random() < 0.5 else []
    for _ in range(rng.choice([1, 1, 2, 3, 6])):
        answer = {"role": "assistant", "content": draw_content(rng)}
        answer |= {"reasoning_content": draw_content(rng)} if rng.random() < 0.1 else {}
        answer |= {"tool_calls": [CALL]} if rng.random() < 0.1 else {}
        messages += [{"role": "user", "content": draw_content(rng)}, answer]
        if rng.random() < 0.1:
            messages.append({"role": rng.choice(["tool", "function", "ipython"]), "content": draw_content(rng)})
    return {"messages": messages} | ({"tools": [TOOL]} if rng.random() < 0.1 else {})


def squeeze(text):
    return "".join(text.split())


def spellings(text):
    return {squeeze(text), squeeze(json.dumps(text)[1:-1]), squeeze(json.dumps(text, ensure_ascii=False)[1:-1])}


def find_lost(document, text):
    """The contents that are not in a text, each looked for in what the longer ones leave of it."""
    left, lost = squeeze(text), []
    pieces = [m[field] for m in document.messages for field in ("reasoning_content", "content") if m.get(field)]
    for piece in sorted(pieces, key=lambda piece: len(squeeze(piece)), reverse=True):
        found = next((words for words in spellings(piece) if words in left), None)
        left = left if found is None else left.replace(found, "\0", 1)
        lost += [piece] if found is None else []
    called = any(m.get("tool_calls") for m in document.messages)
    return lost + (["weigh"] if (called or document.tools) and "weigh" not in text else [])


@pytest.mark.parametrize("kind", TEMPLATES)
def test_no_content_is_lost(tokenizer, kind):
    rng, counts, source = random.Random(kind), Counter(), Source(kind="text")
    tokenizer.chat_template = TEMPLATES[kind]
    for _ in range(2000 // len(TEMPLATES) + 1):
        try:
            document = read_record(draw_record(rng), "f:1", source)
            text = find_chat(tokenizer, source, tools=bool(document.tools)).write(document)
        except DataError:
            counts["refused"] += 1
            continue
        counts["whole"] += 1
        assert find_lost(document, text) == []
    assert counts["whole"] > 10
    assert counts["refused"] > 10
