import pytest

from instruments.errors import DataError
from stages.text.config import DataConfig
from stages.text.documents import Document, read_record

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_reads_text():
    assert read_record({"text": " a\n", "id": 3}, "f:1", DataConfig()) == Document("f:1", " a\n")
    assert read_record({"body": "a"}, "f:1", DataConfig(text_column="body")) == Document("f:1", "a")


def test_prefers_the_conversation_to_the_text():
    record = {"text": "a", "messages": [*MESSAGES, {"role": "user", "content": "c", "id": 3, "tool_calls": None}]}
    expected = Document("f:1", messages=(*MESSAGES, {"role": "user", "content": "c"}))
    assert read_record(record, "f:1", DataConfig()) == expected


@pytest.mark.parametrize("nothing", [None, []])
def test_reads_the_text_where_the_conversation_is_null_or_empty(nothing):
    assert read_record({"text": "a", "messages": nothing}, "f:1", DataConfig()) == Document("f:1", "a")


@pytest.mark.parametrize("record", [{"text": ""}, {"text": " \n\t"}, {"text": None}, {"messages": []}])
def test_empty_records_are_no_documents(record):
    assert read_record(record, "f:1", DataConfig()) is None


def test_half_a_surrogate_pair_becomes_a_question_mark():
    assert read_record({"text": "a\ud83d"}, "f:1", DataConfig()) == Document("f:1", "a?")
    record = {"messages": [{"role": "user", "content": "\udd9e"}]}
    assert read_record(record, "f:1", DataConfig()) == Document("f:1", messages=({"role": "user", "content": "?"},))


@pytest.mark.parametrize(
    ("record", "what", "where"),
    [
        ({"body": "a", "id": 3}, "neither column 'messages' nor column 'text'", "its columns: body, id"),
        ({}, "neither column 'messages' nor column 'text'", "its columns: none"),
        ({"text": 3}, "column 'text' holds a number, not text", ""),
        (["a"], "a record is a list, not an object", ""),
        ({"messages": "a"}, "a conversation is text, not a list", "column messages"),
        ({"messages": [MESSAGES[0], {"from": "gpt"}]}, "a message needs a role and a content", "message 2"),
        ({"messages": [MESSAGES[0], "b"]}, "a message needs a role and a content", "message 2"),
        ({"messages": [MESSAGES[0] | {"content": [{"type": "text"}]}]}, "a message needs a role", "message 1"),
        ({"messages": [MESSAGES[0] | {"tool_calls": ["f"]}]}, "a message has tool_calls, and only", "message 1"),
        ({"messages": [MESSAGES[0] | {"reasoning_content": "b"}]}, "a message has reasoning_content", "message 1"),
    ],
)
def test_says_what_is_wrong_with_a_record(record, what, where):
    with pytest.raises(DataError) as caught:
        read_record(record, "f:1", DataConfig())
    assert what in caught.value.what
    assert caught.value.where.startswith("f:1")
    assert where in caught.value.where
