import pytest

from instruments.errors import DataError
from stages.text.config import Source
from stages.text.documents import (
    MAX_CHARACTERS,
    MAX_MESSAGES,
    Document,
    bound_documents,
    cut_passages,
    interleave,
    read_record,
    take_share,
    without_filled,
)

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def read(record, **settings):
    return read_record(record, "f:1", Source(**settings))


def test_reads_text():
    assert read({"text": " a\n", "id": 3}) == Document("f:1", " a\n")
    assert read({"body": "a"}, text_column="body") == Document("f:1", "a")


def test_prefers_the_conversation_to_the_text():
    record = {"text": "a", "messages": [*MESSAGES, {"role": "user", "content": "c", "id": 3, "tool_calls": None}]}
    assert read(record, ignored_fields=["id"]) == Document(
        "f:1", messages=(*MESSAGES, {"role": "user", "content": "c"})
    )
    for nothing in (None, []):
        assert read({"text": "a", "messages": nothing}) == Document("f:1", "a")


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"instruction": "a", "input": "", "output": "b"},
        {"prompt": "a", "completion": "b"},
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
        {"id": 3, "instruction": "a", "response": "b"},
    ],
)
def test_the_columns_of_well_known_datasets_are_a_conversation(record):
    assert read(record) == Document("f:1", messages=tuple(MESSAGES))
    assert read(record | {"text": "c"}) == Document("f:1", "c")
    assert read(record | {"text": "", "messages": None}) == read(record)


def test_blank_columns_and_messages_hide_nothing():
    record = {"instruction": "a", "output": "b"}
    assert read(record | {"text": " ", "prompt": "### a ### b"}).messages == tuple(MESSAGES)
    system = {"role": "system", "content": ""}
    assert read({"messages": [system, *MESSAGES], "system": "s"}).messages[0] == system | {"content": "s"}
    assert read({"instruction": " ", "input": "x", "output": "b"}).messages[0]["content"].strip() == "x"


def test_an_instruction_without_an_answer_is_read_alone():
    assert read({"instruction": "a", "output": ""}).messages == tuple(MESSAGES[:1])
    assert read({"instruction": "a", "output": "", "text": None}) is None


def test_copies_with_other_line_ends_are_copies():
    assert len({Document("f:1", text).digest for text in ("a\nb", "a\r\nb\n", "a\nb ")}) == 1
    chats = ([MESSAGES[0] | {"content": text}] for text in ("a\nb", "a\r\nb"))
    assert len({read({"messages": messages}).digest for messages in chats}) == 1


def test_content_in_parts_of_text_is_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read({"messages": [MESSAGES[0] | {"content": parts}]}).messages[0]["content"] == "ab"
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(DataError, match="no text"):
        read({"messages": [MESSAGES[0] | {"content": [*parts, image]}]})


def test_what_a_table_fills_with_null_is_left_out():
    call = {"function": {"name": "f", "arguments": {"city": "Bonn", "zone": None}}}
    row = {"messages": [MESSAGES[1] | {"content": None, "tool_calls": [call]}], "text": None}
    kept = without_filled(row)
    assert kept["text"] is None
    assert kept["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"city": "Bonn"}


def test_what_tokenizers_reject_is_replaced_inside_calls_and_tools_too():
    call = {"function": {"name": "f", "arguments": {"\ud800": ["\ud800"]}}}
    document = read({"messages": [MESSAGES[0] | {"tool_calls": [call]}], "functions": '[{"name": "\\ud800"}]'})
    assert document.messages[0]["tool_calls"][0]["function"]["arguments"] == {"?": ["?"]}
    assert document.tools == ({"type": "function", "function": {"name": "?"}},)


@pytest.mark.parametrize("column", ["input", "context"])
def test_an_instruction_has_its_input_below(column):
    record = {"instruction": "a", column: "x", "output": "b"}
    assert read(record).messages[0]["content"] == "a\n\nx"
    assert read(record, ignored_fields=[column]).messages[0]["content"] == "a"
    with pytest.raises(DataError, match=rf"holds list, not text[^$]*ignored_fields=\[{column}\]"):
        read(record | {column: ["x"]})


@pytest.mark.parametrize(
    "record",
    [
        {"messages": MESSAGES},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "completion": "b"},
    ],
)
def test_a_system_prompt_beside_a_conversation_is_its_first_message(record):
    system = {"role": "system", "content": "s"}
    assert read(record | {"system": None, "system_prompt": "s"}).messages == (system, *MESSAGES)
    assert read({"messages": [system, *MESSAGES], "system": "s "}).messages == (system, *MESSAGES)
    assert read({"messages": [system, *MESSAGES], "system": "t"}, ignored_fields=["system"]).messages[0] == system


def test_earlier_turns_beside_an_instruction_come_first():
    record = {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]}
    assert [message["content"] for message in read(record).messages] == ["s", "a", "b", "c", "d"]
    with pytest.raises(DataError, match="pairs of question and answer"):
        read(record | {"history": ["a", "b"]})


def test_calls_of_tools_are_read_with_values_as_arguments():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    expected = {"role": "assistant", "content": "", "tool_calls": [call]}
    function = {"name": "f", "arguments": '{"x": 1}'}
    for fields in ({"tool_calls": [{"function": function}]}, {"tool_calls": function}, {"function_call": function}):
        record = {"messages": [{"role": "assistant", "content": None, **fields}], "functions": [tool["function"]]}
        assert read(record) == Document("f:1", messages=(expected,), tools=(tool,))
        assert read(record).digest != read({"messages": record["messages"]}).digest


@pytest.mark.parametrize(
    ("fields", "labels", "trained"),
    [
        ({"weight": 0}, "completion", False),
        ({"train": False}, "generated", False),
        ({"weight": 1, "train": True}, "completion", True),
        ({"train": True}, "full_sequence", True),
        ({"train": False}, "full_sequence", None),
    ],
)
def test_a_message_says_whether_the_loss_counts_it(fields, labels, trained):
    record = {"messages": [MESSAGES[0], MESSAGES[1] | fields]}
    if trained is None:
        with pytest.raises(DataError, match=r"data\.labels=completion"):
            read(record, labels=labels)
    else:
        assert read(record, labels=labels).messages[1].get("train", True) is trained


@pytest.mark.parametrize("record", [{"text": ""}, {"text": " \n\t"}, {"text": None}, {"messages": []}])
def test_empty_records_are_no_documents(record):
    assert read(record) is None


def test_half_a_surrogate_pair_becomes_a_question_mark():
    assert read({"text": "a\ud83d"}) == Document("f:1", "a?")
    assert read({"messages": [{"role": "user", "content": "\udd9e"}]}).messages[0]["content"] == "?"


@pytest.mark.parametrize(
    ("record", "where"),
    [
        ({"body": "a", "id": 3}, "f:1; its columns: body, id"),
        ({}, "f:1; its columns: none"),
        ({"text": 3}, "f:1"),
        (["a"], "f:1"),
        ({"messages": "a"}, "f:1, column messages, message 1"),
        ({"messages": [MESSAGES[0], {"from": "gpt"}]}, "f:1, column messages, message 2"),
        ({"messages": [MESSAGES[0] | {"content": [{"type": "text"}]}]}, "f:1, column messages, message 1"),
        ({"messages": [MESSAGES[0] | {"tool_calls": ["f"]}]}, "f:1, column messages, message 1"),
        (
            {"messages": [MESSAGES[0] | {"function_call": {"name": "f", "arguments": "{"}}]},
            "f:1, column messages, message 1",
        ),
        ({"messages": [MESSAGES[0] | {"loss_mask": 0}]}, "f:1, column messages, message 1"),
        ({"messages": [MESSAGES[0] | {"id": 3}]}, "f:1, column messages, message 1"),
        ({"messages": [MESSAGES[1] | {"weight": 0.5}]}, "f:1, column messages, message 1"),
        ({"messages": MESSAGES, "tools": "{"}, "f:1, column tools"),
        ({"conversations": [{"from": "human"}]}, "f:1, message 1"),
        ({"prompt": "a", "chosen": "b"}, "f:1; its columns: prompt, chosen"),
        ({"messages": [{"role": "system", "content": "s"}, *MESSAGES], "system": "other"}, "f:1"),
        ({"messages": MESSAGES, "system": "s", "system_prompt": "t"}, "f:1"),
        ({"instruction": "a", "input": "x", "context": "y", "output": "b"}, "f:1"),
        ({"instruction": "a", "output": "b", "response": "c"}, "f:1"),
        ({"instruction": "a", "prompt": "x", "output": "b"}, "f:1"),
        ({"messages": [MESSAGES[0] | {"tool_calls": [{"function": "f"}]}]}, "f:1, column messages, message 1"),
        ({"messages": MESSAGES, "functions": 3}, "f:1, column tools"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(record, where):
    with pytest.raises(DataError) as caught:
        read(record)
    assert caught.value.where == where


def test_a_wrong_column_names_the_setting_of_the_source():
    with pytest.raises(DataError) as caught:
        read({"body": "a"}, place="data.sources.2")
    assert "data.sources.2.text_column=" in caught.value.do


def test_long_documents_are_cut():
    text = "words and " * 60_000
    parts = list(bound_documents([Document("a:1", text)]))
    assert [part.name for part in parts] == ["a:1, part 1", "a:1, part 2", "a:1, part 3"]
    assert " ".join(part.text for part in parts) == text.strip()
    short = Document("a:2", "x" * MAX_CHARACTERS)
    assert list(bound_documents([short])) == [short]


def test_long_conversations_keep_their_first_turns(caplog):
    def converse(*contents):
        (found,) = bound_documents(
            [Document("a:1", messages=tuple({"role": "user", "content": text} for text in contents))]
        )
        return [message["content"] for message in found.messages]

    assert len(converse(*["a"] * 100_000)) == MAX_MESSAGES
    assert converse("a", "b", "c" * MAX_CHARACTERS) == ["a", "b"]
    assert caplog.messages[1] == "a:1: only the first 2 of 3 messages are read"


@pytest.mark.parametrize(
    ("lines", "shortest", "longest", "passages"),
    [
        pytest.param(
            ["aaaa\n", "\n", "bbbb\n", " \n", "cccc\n"], 8, 100, [(1, "aaaa\n\nbbbb"), (5, "cccc")], id="blank line"
        ),
        pytest.param(["aaaa\n", "bbbb\n", "cccc\n"], 2, 10, [(1, "aaaa\nbbbb"), (3, "cccc")], id="line end"),
        pytest.param(["\n", "  a\n", "b \n", "\n"], 9, 99, [(2, "  a\nb")], id="indentation of the first line"),
        pytest.param(["\n", " \n", "a\n"], 1, 2, [(3, "a")], id="white space"),
        pytest.param([], 1, 2, [], id="nothing"),
    ],
)
def test_passages(lines, shortest, longest, passages):
    assert list(cut_passages(lines, shortest, longest)) == passages


def test_sources_take_turns_until_all_are_empty_and_are_opened_in_their_turn():
    assert list(interleave([[1, 2, 3], [], [10], [20, 21]])) == [1, 10, 20, 2, 21, 3]
    touched = []

    def source(name):
        touched.append(name)
        yield name

    next(interleave([source("a"), source("b")]))
    assert touched == ["a"]


def test_a_share_is_held_out_by_content_and_is_the_same_on_every_machine():
    documents = [Document(f"here:{number}", f"text {number}") for number in range(2000)]
    heldout, calibration = (list(take_share(documents, split, 0.1)) for split in ("heldout", "calibration"))
    assert sorted(heldout + calibration, key=documents.index) == documents
    assert 150 <= len(heldout) <= 250
    assert [document.text for document in heldout[:4]] == ["text 2", "text 3", "text 6", "text 18"]
    copies = [Document("there:1", document.text) for document in documents]
    assert [copy.text for copy in take_share(copies, "heldout", 0.1)] == [document.text for document in heldout]
    assert (list(take_share(documents, "heldout", 1.0)), list(take_share(documents, "heldout", 0.0))) == (documents, [])
