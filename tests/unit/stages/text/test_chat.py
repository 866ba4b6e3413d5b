from datetime import UTC, datetime

import pytest
from transformers import ByT5Tokenizer

from instruments.errors import DataError
from stages.text.chat import encode_conversation, encode_prompt
from stages.text.documents import Document

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
# Like Llama 3.2: a date in the text.
DATED = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}" + UNMARKED
REFUSING = "{{ raise_exception('conversation roles must alternate') }}"
# A further message changes the rendering of the earlier ones.
COUNTING = "{{ messages | length }}{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"


def supervise(conversation, tokenizer):
    """The text of the supervised tokens, and of all tokens."""
    ids, counts = encode_conversation(Document("f:1", messages=tuple(conversation)), tokenizer, completion=True)
    supervised = [id_ for id_, count in zip(ids, counts, strict=True) if count]
    return tokenizer.decode(supervised), tokenizer.decode(ids)


def test_generation_marks_supervise_the_answers_and_their_ends(tokenizer, conversation):
    supervised, everything = supervise(conversation, tokenizer)
    assert supervised == "A crustacean.<|endoftext|>龙虾 🦞<|endoftext|>"
    assert everything == tokenizer.apply_chat_template(conversation, tokenize=False)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (UNMARKED, "A crustacean.<|endoftext|>龙虾 🦞<|endoftext|>"),
        (THINKING, "A crustacean.<|endoftext|><think>\n\n</think>\n\n龙虾 🦞<|endoftext|>"),
        # The token " A" joins the template's space and the answer's first letter.
        (PLAIN, " A crustacean.\n龙虾 🦞\n"),
    ],
)
def test_without_marks_the_renderings_show_the_answers_and_their_ends(tokenizer, conversation, template, expected):
    tokenizer.chat_template = template
    supervised, everything = supervise(conversation, tokenizer)
    assert supervised == expected
    assert everything == tokenizer.apply_chat_template(conversation, tokenize=False)


def test_marked_and_unmarked_templates_agree(tokenizer, conversation):
    document = Document("f:1", messages=tuple(conversation))
    marked = encode_conversation(document, tokenizer, completion=True)
    tokenizer.chat_template = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert encode_conversation(document, tokenizer, completion=True) == marked


@pytest.mark.parametrize("template", [UNMARKED, THINKING])
def test_an_answer_that_occurs_elsewhere_too_is_found_in_its_own_turn(tokenizer, template):
    tokenizer.chat_template = template
    conversation = [
        {"role": "user", "content": "user"},
        {"role": "assistant", "content": "user"},
        {"role": "user", "content": "assistant"},
        {"role": "assistant", "content": "user"},
        {"role": "user", "content": "user"},
    ]
    assert supervise(conversation, tokenizer)[0] == "user<|endoftext|>user<|endoftext|>"


def test_an_empty_answer_is_its_end(tokenizer, conversation):
    tokenizer.chat_template = UNMARKED
    conversation[1]["content"] = ""
    assert supervise(conversation, tokenizer)[0] == "<|endoftext|>龙虾 🦞<|endoftext|>"


def test_without_completion_every_token_counts(tokenizer, conversation):
    ids, counts = encode_conversation(Document("f:1", messages=tuple(conversation)), tokenizer, completion=False)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(conversation, tokenize=False)
    assert counts == [True] * len(ids)


def test_special_tokens_are_those_the_template_writes(tokenizer, conversation):
    tokenizer.chat_template = "{{ bos_token }}" + UNMARKED
    ids, _ = encode_conversation(Document("f:1", messages=tuple(conversation)), tokenizer, completion=False)
    assert ids.count(tokenizer.bos_token_id) == 1 + len(conversation)


@pytest.mark.parametrize("completion", [True, None])
def test_no_chat_template(tokenizer, conversation, completion):
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        encode(conversation, tokenizer, completion)


def encode(conversation, tokenizer, completion):
    document = Document("f:1", messages=tuple(conversation))
    if completion is None:
        return encode_prompt(document, tokenizer)
    return encode_conversation(document, tokenizer, completion=completion)


@pytest.mark.parametrize("completion", [True, False, None])
def test_a_template_that_refuses(tokenizer, conversation, completion):
    """Also for a prompt alone (None)."""
    tokenizer.chat_template = REFUSING
    with pytest.raises(DataError, match="the chat template refuses the conversation: conversation roles"):
        encode(conversation, tokenizer, completion)


@pytest.mark.parametrize(
    ("template", "answer"), [(THINKING, "<think>Hm.</think>A crustacean."), (THINKING, ""), (COUNTING, "A crustacean.")]
)
def test_a_rendering_that_hides_the_answers(tokenizer, conversation, template, answer):
    tokenizer.chat_template, conversation[1]["content"] = template, answer
    with pytest.raises(DataError, match="does not show where the assistant's turns are"):
        supervise(conversation, tokenizer)


def test_a_conversation_that_begins_with_an_answer(tokenizer, conversation):
    """transformers renders no empty conversation, so that nothing shows where this answer begins."""
    opened = conversation[1:]
    assert supervise(opened, tokenizer)[0] == "A crustacean.<|endoftext|>龙虾 🦞<|endoftext|>"
    tokenizer.chat_template = UNMARKED
    with pytest.raises(DataError) as caught:
        supervise(opened, tokenizer)
    assert str(caught.value).startswith("the rendered conversation does not show where the assistant's turns are")


@pytest.mark.parametrize("marks", ["", "{% generation %}{% endgeneration %}"])
@pytest.mark.parametrize("completion", [True, False, None])
def test_roles_that_the_template_leaves_out(tokenizer, conversation, completion, marks):
    tokenizer.chat_template = KNOWN_ROLES + marks
    messages = [*conversation[:2], {"role": "human", "content": "Why  so?"}, {"role": "gpt", "content": ""}]
    with pytest.raises(DataError, match="the chat template leaves out the messages of role 'human'"):
        encode(messages, tokenizer, completion)
    tokenizer.chat_template = UNMARKED  # writes messages of any role
    assert "<|human|>\nWhy  so?" in supervise(messages, tokenizer)[1]


def test_roles_whose_messages_are_written_in_other_quotes(tokenizer, conversation):
    """Like Llama 3.1, whose results of tools have the role ipython."""
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | tojson }}{% endfor %}"
    document = Document("f:1", messages=(*conversation, {"role": "ipython", "content": '{"legs": 10}'}))
    ids, _ = encode_conversation(document, tokenizer, completion=False)
    assert r"{\"legs\": 10}" in tokenizer.decode(ids)


@pytest.mark.parametrize("completion", [True, False])
@pytest.mark.parametrize("marks", [True, False])
def test_the_text_is_the_same_tomorrow(tokenizer, conversation, monkeypatch, completion, marks):
    tokenizer.chat_template = DATED
    if marks:
        tokenizer.chat_template += "{% generation %}{% endgeneration %}"
    document = Document("f:1", messages=tuple(conversation))

    def encode_on(day):
        clock = type("clock", (), {"now": lambda: datetime(2031, 5, day, tzinfo=UTC)})
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
        return encode_conversation(document, tokenizer, completion=completion), encode_prompt(document, tokenizer)

    assert encode_on(3) == encode_on(4)
    assert tokenizer.decode(encode_on(4)[1]).startswith("26 Jul 2024<|user|>\nWhat is a lobster?")


@pytest.fixture
def slow_tokenizer():
    """A tokenizer without Rust code: it does not tell where its tokens are."""
    slow = ByT5Tokenizer()
    slow.chat_template, slow.name_or_path = PLAIN, "slow"
    return slow


def test_a_slow_tokenizer_encodes_whole_conversations(slow_tokenizer, conversation):
    document = Document("f:1", messages=tuple(conversation))
    ids, counts = encode_conversation(document, slow_tokenizer, completion=False)
    text = slow_tokenizer.apply_chat_template(conversation, tokenize=False)
    assert ids == slow_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert counts == [True] * len(ids)
    assert encode_prompt(document, slow_tokenizer) == ids[: len(encode_prompt(document, slow_tokenizer))]


def test_a_slow_tokenizer_cannot_label_answers(slow_tokenizer, conversation):
    with pytest.raises(DataError) as caught:
        supervise(conversation, slow_tokenizer)
    assert str(caught.value).startswith("this tokenizer cannot show which tokens are the assistant's")


def prompt_of(conversation, tokenizer):
    return tokenizer.decode(encode_prompt(Document("f:1", messages=tuple(conversation)), tokenizer))


def test_a_prompt_is_all_before_the_last_answer_and_opens_its_turn(tokenizer, conversation):
    expected = "<|user|>\nWhat is a lobster?\n<|assistant|>\nA crustacean.<|endoftext|><|user|>\nUnd auf Chinesisch?\n"
    assert prompt_of(conversation, tokenizer) == expected + "<|assistant|>\n"
    # A conversation that ends with a question is the whole prompt.
    assert prompt_of(conversation[:3], tokenizer) == expected + "<|assistant|>\n"


@pytest.mark.parametrize("template", [None, UNMARKED, PLAIN])
def test_a_prompt_is_where_the_labels_of_the_answer_begin(tokenizer, conversation, template):
    tokenizer.chat_template = template or tokenizer.chat_template
    document = Document("f:1", messages=tuple(conversation))
    ids, counts = encode_conversation(document, tokenizer, completion=True)
    prompt = encode_prompt(document, tokenizer)
    assert ids[: len(prompt)] == prompt
    assert counts[len(prompt) - 1 : len(prompt) + 1] == [False, True]


def test_an_answer_to_nothing_has_no_prompt(tokenizer, conversation):
    assert encode_prompt(Document("f:1", messages=(conversation[1], conversation[3])), tokenizer) == []
