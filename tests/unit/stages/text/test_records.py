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


BAD_MESSAGE = """a message needs a role and a content, both text
  where: f:1, column messages, message 2
  do:    {"role": "user", "content": "..."}"""


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"body": "a", "id": 3},
            """a record has neither column 'messages' nor column 'text'
  where: f:1; its columns: body, id
  do:    name the column: data.text_column= or data.messages_column=""",
        ),
        (
            {},
            """a record has neither column 'messages' nor column 'text'
  where: f:1; its columns: none
  do:    name the column: data.text_column= or data.messages_column=""",
        ),
        (
            {"text": 3},
            """column 'text' holds a number, not text
  where: f:1
  do:    name a column of text: data.text_column=""",
        ),
        (
            ["a"],
            """a record is a list, not an object
  where: f:1
  do:    one JSON object a line: {"text": "..."}""",
        ),
        (
            {"messages": "a"},
            """a conversation is text, not a list
  where: f:1, column messages
  do:    [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]""",
        ),
        ({"messages": [MESSAGES[0], {"from": "gpt", "value": "b"}]}, BAD_MESSAGE),
        ({"messages": [MESSAGES[0], "b"]}, BAD_MESSAGE),
        (
            {"messages": [MESSAGES[0], {"role": "assistant", "content": "", "tool_calls": [{"function": "f"}]}]},
            """a message has tool_calls, and only its role and content are read
  where: f:1, column messages, message 2
  do:    write the calls into the content, as the model should write them; or remove the field""",
        ),
        (
            {"messages": [MESSAGES[0], {"role": "assistant", "content": "b", "reasoning_content": "a, thus b"}]},
            """a message has reasoning_content, and only its role and content are read
  where: f:1, column messages, message 2
  do:    write the thoughts into the content, as the model should write them; or remove the field""",
        ),
        ({"messages": [MESSAGES[0], {"role": "assistant", "content": [{"type": "text"}]}]}, BAD_MESSAGE),
    ],
)
def test_says_what_is_wrong_with_a_record(record, message):
    with pytest.raises(DataError) as caught:
        read_record(record, "f:1", DataConfig())
    assert str(caught.value) == message
