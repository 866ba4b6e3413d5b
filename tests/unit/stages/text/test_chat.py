from datetime import UTC, datetime

import pytest
from transformers import ByT5Tokenizer

from instruments.errors import DataError
from stages.text.chat import encode_conversation, encode_prompt
from stages.text.config import Source
from stages.text.documents import Document
from stages.text.template import RenderingError

# The embedded tokenizer's format with a newline after each turn and without generation marks.
UNMARKED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Like Qwen3: trims content, drops earlier thoughts, puts an empty thought before the last answer.
THINKING = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'].split('</think>')[-1].strip() + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Like Qwen3.5: the same, and the generation prompt opens a thought.
OPENING = THINKING.replace("{{ '<|assistant|>\n' }}{% endif %}", "{{ '<|assistant|>\n<think>\n' }}{% endif %}")
# Like DeepSeek-R1: no turn has a thought, and the generation prompt opens one.
OPENING_ALONE = UNMARKED.replace("{{ '<|assistant|>\n' }}{% endif %}", "{{ '<|assistant|>\n<think>\n' }}{% endif %}")
# Like Phi-3: a further end behind the whole text.
ENDED_TWICE = UNMARKED.replace("{% if add", "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}{% if add")
# Only a newline ends a turn.
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# Like Qwen2.5: a default system message, and nothing for roles that it does not know.
KNOWN_ROLES = (
    "{{ 'You are helpful.' }}{% for m in messages %}{% if m['role'] in ['user', 'assistant'] %}"
    "{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
# No answers.
FORGETFUL = UNMARKED.replace("for m in messages", "for m in messages if m['role'] == 'user'")
# Like Llama 3.2: a date in the text.
DATED = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}" + UNMARKED
REFUSING = "{{ raise_exception('conversation roles must alternate') }}"
# Like templates that require an answer at the end.
ENDING = UNMARKED + "{% if messages[-1]['role'] == 'user' %}{{ raise_exception('nobody answers') }}{% endif %}"
# A further message changes the rendering of the earlier ones.
COUNTING = "{{ messages | length }}{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"


def encode(messages, tokenizer, labels="completion", tools=(), **settings):
    """Token ids, and whether they count; `labels=None`: the ids of the prompt."""
    document = Document("f:1", messages=tuple(messages), tools=tuple(tools))
    if labels is None:
        return encode_prompt(document, tokenizer, Source(**settings))
    return encode_conversation(document, tokenizer, Source(labels=labels, **settings))


def supervise(messages, tokenizer):
    """The text of the supervised tokens, and of all tokens."""
    ids, counts = encode(messages, tokenizer)
    supervised = [id_ for id_, count in zip(ids, counts, strict=True) if count]
    return tokenizer.decode(supervised), tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "A crustacean.<|endoftext|>龙虾 🦞<|endoftext|>"),  # generation marks
        (UNMARKED, "A crustacean.<|endoftext|>龙虾 🦞<|endoftext|>"),
        (THINKING, "A crustacean.<|endoftext|><think>\n\n</think>\n\n龙虾 🦞<|endoftext|>"),
        (OPENING, "A crustacean.<|endoftext|>\n</think>\n\n龙虾 🦞<|endoftext|>"),
        (OPENING_ALONE, "A crustacean.<|endoftext|>龙虾 🦞<|endoftext|>"),
        (ENDED_TWICE, "A crustacean.<|endoftext|>龙虾 🦞<|endoftext|>\n<|endoftext|>"),
        # The token " A" joins the template's space and the answer's first letter.
        (PLAIN, " A crustacean.\n龙虾 🦞\n"),
    ],
)
def test_the_answers_and_their_ends_are_supervised(tokenizer, conversation, template, expected):
    tokenizer.chat_template = template or tokenizer.chat_template
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert supervise(conversation, tokenizer) == (expected, text)
    ids, counts = encode(conversation, tokenizer, "full_sequence")
    assert (tokenizer.decode(ids), counts) == (text, [True] * len(ids))


def test_marked_and_unmarked_templates_agree(tokenizer, conversation):
    marked = encode(conversation, tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert encode(conversation, tokenizer) == marked


@pytest.mark.parametrize("template", [UNMARKED, THINKING, OPENING_ALONE])
def test_an_answer_that_occurs_elsewhere_too_is_found_in_its_own_turn(tokenizer, template):
    tokenizer.chat_template = template
    turns = ("user", "user"), ("assistant", "user"), ("user", "assistant"), ("assistant", "user"), ("user", "user")
    conversation = [{"role": role, "content": content} for role, content in turns]
    assert supervise(conversation, tokenizer)[0] == "user<|endoftext|>user<|endoftext|>"


def test_an_empty_answer_is_its_end(tokenizer, conversation):
    tokenizer.chat_template = UNMARKED
    conversation[1]["content"] = ""
    assert supervise(conversation, tokenizer)[0] == "<|endoftext|>龙虾 🦞<|endoftext|>"


def test_special_tokens_are_those_the_template_writes(tokenizer, conversation):
    tokenizer.chat_template = "{{ bos_token }}" + UNMARKED
    ids, _ = encode(conversation, tokenizer, "full_sequence")
    assert ids.count(tokenizer.bos_token_id) == 1 + len(conversation)


@pytest.mark.parametrize("labels", ["completion", "full_sequence", None])
@pytest.mark.parametrize(("template", "what"), [(None, "has no chat template"), (REFUSING, "roles must alternate")])
def test_a_template_that_is_missing_or_refuses(tokenizer, conversation, labels, template, what):
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=what):
        encode(conversation, tokenizer, labels)


@pytest.mark.parametrize(("template", "answer"), [(THINKING, ""), (COUNTING, "A crustacean.")])
def test_a_rendering_that_hides_the_answers(tokenizer, conversation, template, answer):
    tokenizer.chat_template, conversation[1]["content"] = template, answer
    with pytest.raises(DataError) as caught:
        supervise(conversation, tokenizer)
    assert "data.labels=full_sequence" in caught.value.do


CALL = {"type": "function", "function": {"name": "weigh", "arguments": {"what": "a lobster", "unit": None}}}
TOOL = {"type": "function", "function": {"name": "weigh", "description": "Weighs.", "parameters": {"type": "object"}}}
# Like Qwen2.5: tools, and calls of them as JSON.
CALLING = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
)


@pytest.mark.parametrize("labels", ["completion", "full_sequence", None])
@pytest.mark.parametrize(
    ("template", "change", "missing"),
    [
        (THINKING, {"content": "<think>Hm.</think>A crustacean."}, "the content of message 2"),
        (UNMARKED, {"reasoning_content": "Hm."}, "the reasoning_content of message 2"),
        (UNMARKED, {"tool_calls": [CALL]}, "a tool call of message 2"),
        (UNMARKED.replace("m['content']", "m['content'][:9]"), {}, "the content of message 1"),
        # The content is also a part of the template, and of another message.
        (FORGETFUL, {"content": "user"}, "all of message 2"),
        (FORGETFUL, {"content": "What"}, "all of message 2"),
        ("{{ '' }}", {}, "all of message 1"),
    ],
)
def test_a_template_that_leaves_something_out(tokenizer, conversation, labels, template, change, missing):
    tokenizer.chat_template = template
    conversation[1] |= change
    with pytest.raises(RenderingError, match=f"leaves out {missing}"):
        encode(conversation, tokenizer, labels)
    ids, counts = encode(conversation, tokenizer, "completion", chat_template="plain")
    text = "".join(tokenizer.decode(ids).split())
    assert all("".join(str(value).split()) in text for value in conversation[1].values() if isinstance(value, str))
    assert any(counts)
    assert not all(counts)


@pytest.mark.parametrize("template", [CALLING, None])
def test_tools_and_calls_of_them_are_written(tokenizer, conversation, template):
    tokenizer.chat_template = template or tokenizer.chat_template
    conversation[1] |= {"content": "", "tool_calls": [CALL]}
    if template is None:
        with pytest.raises(RenderingError, match="a tool call of message 2"):
            encode(conversation, tokenizer, tools=[TOOL])
        conversation[1] = {"role": "assistant", "content": "No."}
        with pytest.raises(RenderingError, match="the tools"):
            encode(conversation, tokenizer, tools=[TOOL])
    else:
        text = tokenizer.decode(encode(conversation, tokenizer, "full_sequence", tools=[TOOL])[0])
        assert text.startswith('{"type": "function", "function": {"name": "weigh", "description"')
        assert '<|assistant|>\n{"name": "weigh", "arguments": {"what": "a lobster", "unit": null}}' in text


@pytest.mark.parametrize("template", [None, UNMARKED])
def test_an_answer_that_the_record_takes_out_is_not_supervised(tokenizer, conversation, template):
    tokenizer.chat_template = template or tokenizer.chat_template
    conversation[1]["train"] = False
    if template is None:
        tokenizer.chat_template = UNMARKED + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    assert supervise(conversation, tokenizer)[0] == "龙虾 🦞<|endoftext|>"


def test_a_template_is_one_of_several_names_or_a_file(tokenizer, conversation, tmp_path):
    tokenizer.chat_template = {"rag": PLAIN, "tool_use": CALLING}
    with pytest.raises(DataError) as caught:
        encode(conversation, tokenizer)
    assert "data.chat_template= of: rag, tool_use" in caught.value.do
    plain = encode(conversation, tokenizer, chat_template="rag")
    (tmp_path / "mine.jinja").write_text(PLAIN)
    assert encode(conversation, tokenizer, chat_template=str(tmp_path / "mine.jinja")) == plain
    assert encode(conversation, tokenizer, "full_sequence", tools=[TOOL])[1]
    for wrong in ("no_such_name", str(tmp_path / "none.jinja"), str(tmp_path)):
        with pytest.raises(DataError):
            encode(conversation, tokenizer, chat_template=wrong)


def test_a_template_that_refuses_the_beginning_of_a_conversation(tokenizer, conversation):
    tokenizer.chat_template = ENDING
    assert len(encode(conversation, tokenizer, "full_sequence")[0]) > 0
    with pytest.raises(DataError, match="nobody answers"):
        encode(conversation, tokenizer)


def test_a_conversation_that_begins_with_an_answer(tokenizer, conversation):
    """transformers renders no empty conversation, so that nothing shows where this answer begins."""
    opened = conversation[1:]
    assert supervise(opened, tokenizer)[0] == "A crustacean.<|endoftext|>龙虾 🦞<|endoftext|>"
    tokenizer.chat_template = UNMARKED
    with pytest.raises(DataError, match="does not show where"):
        supervise(opened, tokenizer)


@pytest.mark.parametrize("marks", ["", "{% generation %}{% endgeneration %}"])
@pytest.mark.parametrize("labels", ["completion", "full_sequence", None])
def test_roles_that_the_template_leaves_out(tokenizer, conversation, labels, marks):
    tokenizer.chat_template = KNOWN_ROLES + marks
    messages = [*conversation[:2], {"role": "human", "content": "Why  so?"}, {"role": "gpt", "content": ""}]
    with pytest.raises(DataError, match="role 'human'"):
        encode(messages, tokenizer, labels)
    tokenizer.chat_template = UNMARKED  # writes messages of any role
    assert "<|human|>\nWhy  so?" in supervise(messages, tokenizer)[1]


def test_roles_whose_messages_are_written_in_other_quotes(tokenizer, conversation):
    """Like Llama 3.1, whose results of tools have the role ipython."""
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | tojson }}{% endfor %}"
    messages = [*conversation, {"role": "ipython", "content": '{"legs": 10}'}]
    assert r"{\"legs\": 10}" in tokenizer.decode(encode(messages, tokenizer, "full_sequence")[0])


@pytest.mark.parametrize("marks", ["", "{% generation %}{% endgeneration %}"])
def test_the_text_is_the_same_tomorrow(tokenizer, conversation, monkeypatch, marks):
    tokenizer.chat_template = DATED + marks

    def encode_on(day):
        clock = type("clock", (), {"now": lambda: datetime(2031, 5, day, tzinfo=UTC)})
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
        return [encode(conversation, tokenizer, labels) for labels in ("completion", "full_sequence", None)]

    assert encode_on(3) == encode_on(4)
    assert tokenizer.decode(encode_on(4)[2]).startswith("26 Jul 2024<|user|>\nWhat is a lobster?")


def test_a_tokenizer_without_places_of_tokens_encodes_but_cannot_label_answers(conversation):
    """One without Rust code."""
    slow = ByT5Tokenizer()
    slow.chat_template, slow.name_or_path = PLAIN, "slow"
    ids, counts = encode(conversation, slow, "full_sequence")
    assert ids == slow(slow.apply_chat_template(conversation, tokenize=False), add_special_tokens=False)["input_ids"]
    assert counts == [True] * len(ids)
    with pytest.raises(DataError, match="does not show where"):
        encode(conversation, slow)


@pytest.mark.parametrize("template", [None, UNMARKED, PLAIN])
def test_a_prompt_is_all_before_the_last_answer(tokenizer, conversation, template):
    tokenizer.chat_template = template or tokenizer.chat_template
    ids, counts = encode(conversation, tokenizer)
    prompt = encode(conversation, tokenizer, None)
    assert ids[: len(prompt)] == prompt
    assert counts[len(prompt) - 1 : len(prompt) + 1] == [False, True]
    # A conversation that ends with a question is the whole prompt; an answer to nothing has none.
    assert encode(conversation[:3], tokenizer, None) == prompt
    assert encode([conversation[1], conversation[3]], tokenizer, None) == []
