import logging
from dataclasses import replace

import pytest
from tokenizers.processors import TemplateProcessing

from instruments.errors import DataError
from stages.text.batches import TokenSequence
from stages.text.config import DataConfig, Source, SourceConfig
from stages.text.documents import Document
from stages.text.generated import load_prompts
from stages.text.sequences import (
    describe_skipped,
    encode_document,
    find_begin,
    load_further,
    load_text,
    pack_documents,
    select_usable,
    truncate_documents,
)


def encoded(name, *ids, masked=0):
    return TokenSequence(name, list(ids), [-100] * masked + list(ids[masked:]))


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def config_of(path, **settings):
    """All text is calibration text."""
    return DataConfig(kind="text", path=str(path), **{"heldout_share": 1e-9} | settings)


def test_a_token_id_is_one_number_in_memory(tokenizer, write_jsonl):
    text = "carve a model into experts, and route its tokens. "
    path = write_jsonl("text.jsonl", [{"text": f"{number} {text * 9}"} for number in range(4)])
    tokens = [
        id_ for sequence in load_text(config_of(path), tokenizer, "calibration").sequences for id_ in sequence.ids
    ]
    assert max(tokens) > 256  # smaller numbers are shared by Python
    assert len({*map(id, tokens)}) == len({*tokens})


def test_packing_joins_and_cuts():
    documents = [encoded("a", 1, 2), encoded("b", 3, 4, 5, 6, 7, 8, 9, masked=2), encoded("c", 10)]
    assert list(pack_documents(documents, max_length=3)) == [
        TokenSequence("0: a", [1, 2, 3], [1, 2, -100]),
        TokenSequence("1: b", [4, 5, 6], [-100, 5, 6]),
        TokenSequence("2: b", [7, 8, 9], [7, 8, 9]),
        TokenSequence("3: c", [10], [10]),
    ]


def test_every_sequence_starts_with_the_begin_token_of_the_tokenizer():
    documents = [encoded("a", 9, 1, 2), encoded("b", 9, 3, 4, 5, 6, 7, 8)]  # 9 begins
    packed = list(pack_documents(documents, max_length=4, begin=9))
    assert [sequence.ids for sequence in packed] == [[9, 1, 2, 9], [9, 3, 4, 5], [9, 6, 7, 8]]
    assert packed[1].labels == [-100, 3, 4, 5]
    paragraphs = [encoded("c", 1, 2), encoded("d", 9, 4, 5, 6)]
    assert [each.ids for each in truncate_documents(paragraphs, 3, begin=9)] == [[9, 1, 2], [9, 4, 5]]


def test_the_begin_token_is_that_which_the_tokenizer_adds(tokenizer):
    assert find_begin(tokenizer) is None
    tokenizer.bos_token = "<|endoftext|>"
    assert find_begin(tokenizer) is None
    begin = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", begin)])
    assert find_begin(tokenizer) == begin
    assert encode(tokenizer, Document("f:1", "one")) == "<|endoftext|>one<|endoftext|>"
    assert encode(tokenizer, Document("f:1", "one"), separator="blank_line") == "one\n\n"


def test_usable_sequences_until_enough_and_the_names_of_the_others():
    sequences = [
        TokenSequence("a", [1, 2, 3], [-100, 2, 3]),
        TokenSequence("b", [4, 5], [-100, -100]),
        TokenSequence("c", [6, 7], [6, -100]),  # nothing predicts the first token
        TokenSequence("d", [8], [8]),
        TokenSequence("e", [9, 10, 11, 12], [9, 10, 11, 12]),
        TokenSequence("f", [13, 14], [-100, -100]),
    ]
    text = select_usable(sequences, wanted=5)
    assert text.sequences == [sequences[0], TokenSequence("e", [9, 10], [9, 10])]
    assert text.tokens == 5
    assert text.skipped == {"no token counts in the loss": ["b", "c"], "fewer than 2 tokens": ["d"]}
    last = TokenSequence("g", [4, 5, 6], [-100, -100, 6])
    text = select_usable([sequences[0], last], wanted=5)
    assert (text.sequences, text.skipped) == (sequences[:1], {"no token counts in the loss": ["g"]})


def test_what_was_skipped_in_words():
    assert describe_skipped({"too dull": list("abcdefgh"), "too long": ["d"]}) == [
        "skipped 8 sequences (too dull: a, b, c, d, e and 3 more)",
        "skipped 1 sequence (too long: d)",
    ]


@pytest.mark.parametrize(
    ("record", "settings", "do"),
    [
        (chat("Which birds meet near the house?", "Wrens."), {"labels": "completion", "tokens": 9}, "data.tokens"),
        (chat("long " * 20, "b"), {"labels": "completion", "max_length": 16}, "data.labels=full_sequence"),
        ({"text": "plain"}, {"tokens": 1}, "text that holds more"),
        ({"text": ""}, {}, "data.heldout_share"),
    ],
)
def test_text_without_a_label_is_refused(write_jsonl, tokenizer, record, settings, do):
    path = write_jsonl("a.jsonl", [record])
    with pytest.raises(DataError) as caught:
        load_text(config_of(path, packing="single", **settings), tokenizer, "calibration")
    assert str(path) in caught.value.where
    assert do in caught.value.do


def encode(tokenizer, document, **settings):
    return tokenizer.decode(encode_document(document, tokenizer, Source(**settings)).ids)


def test_documents_end_with_one_separator(tokenizer, conversation):
    assert encode(tokenizer, Document("f:1", "one two<|endoftext|>")) == "one two<|endoftext|>"
    assert encode(tokenizer, Document("f:1", "one two"), separator="blank_line") == "one two\n\n"
    asked = Document("f:1", messages=tuple(conversation[:2]))  # as the template ends it
    text = "<|user|>\nWhat is a lobster?\n<|assistant|>\nA crustacean.<|endoftext|>"
    assert encode(tokenizer, asked) == encode(tokenizer, asked, separator="blank_line") == text
    tokenizer.eos_token = None
    assert encode(tokenizer, Document("f:1", "one two")) == "one two"


def test_packed_text_holds_the_documents_and_their_ends(write_jsonl, tokenizer):
    path = write_jsonl("a.jsonl", [{"text": f"document number {number}"} for number in range(9)])
    sequences = load_text(config_of(path, max_length=16), tokenizer, "calibration").sequences
    assert all(sequence.labels == sequence.ids for sequence in sequences)
    text = tokenizer.decode([id_ for sequence in sequences for id_ in sequence.ids])
    assert text == "".join(f"document number {number}<|endoftext|>" for number in range(9))


def test_a_whole_file_is_one_running_text(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    text = "\n\n".join(" = Lobster =\n\n" + " The lobster pinches." * (number + 1) for number in range(40))
    path.write_text(text, encoding="utf-8")
    data = config_of("none", heldout_path=str(path), separator="blank_line", heldout_tokens=100_000)
    sequences = load_text(data, tokenizer, "heldout").sequences
    assert tokenizer.decode([id_ for sequence in sequences for id_ in sequence.ids]) == text + "\n\n"


@pytest.mark.parametrize("packing", ["packed", "single"])
@pytest.mark.parametrize("tokens", [64, 65, 79, 100])
def test_the_number_of_tokens_is_kept_to_the_token(write_jsonl, tokenizer, packing, tokens):
    path = write_jsonl("a.jsonl", [{"text": f"this is document number {number} " * 4} for number in range(30)])
    data = config_of(path, packing=packing, max_length=16, tokens=tokens)
    sequences = load_text(data, tokenizer, "calibration").sequences
    # A last sequence of one token has nothing to predict and is left out.
    assert sum(len(sequence.ids) for sequence in sequences) == (64 if tokens == 65 else tokens)
    assert [len(sequence.ids) for sequence in sequences[:4]] == [16] * 4


def test_calibration_and_heldout_have_their_own_numbers_of_tokens(tokenizer):
    data = DataConfig(tokens=100, heldout_tokens=50, max_length=32)
    calibration = load_text(data, tokenizer, "calibration").sequences
    heldout = load_text(data, tokenizer, "heldout").sequences
    assert [len(sequence.ids) for sequence in calibration] == [32, 32, 32, 4]
    assert [len(sequence.ids) for sequence in heldout] == [32, 18]


def test_skipped_sequences_are_counted_and_named(write_jsonl, tokenizer, caplog):
    path = write_jsonl("a.jsonl", [chat("a", "b"), chat("long " * 20, "b"), chat("longer " * 20, "b"), chat("c", "d")])
    data = config_of(path, packing="single", labels="completion", max_length=16)
    with caplog.at_level(logging.INFO):
        text = load_text(data, tokenizer, "calibration")
    assert [sequence.name for sequence in text.sequences] == [f"{path}:1", f"{path}:4"]
    assert text.skipped == {"no token counts in the loss": [f"{path}:2", f"{path}:3"]}
    assert load_text(data, tokenizer, "calibration").sequences == text.sequences
    assert caplog.messages[:2] == [
        f"calibration text: skipped 2 sequences (no token counts in the loss: {path}:2, {path}:3)",
        f"calibration text: {text.tokens} of 65536 tokens, 2 sequences of {path}",
    ]


def test_packed_conversations_carry_their_labels_along(write_jsonl, tokenizer):
    path = write_jsonl("a.jsonl", [chat(f"question {number}", f"answer {number}") for number in range(9)])
    sequences = load_text(config_of(path, labels="completion", max_length=16), tokenizer, "calibration").sequences
    kept = [label for sequence in sequences for label in sequence.labels if label != -100]
    assert tokenizer.decode(kept) == "".join(f"answer {number}<|endoftext|>" for number in range(9))


def test_heldout_text_of_its_own_counts_in_full(write_jsonl, tokenizer):
    heldout = write_jsonl("b.jsonl", [{"text": "plain text"}])
    path = write_jsonl("a.jsonl", [chat("a", "b")])
    data = config_of(path, heldout_path=str(heldout), labels="completion")
    (sequence,) = load_text(data, tokenizer, "heldout").sequences
    assert sequence.labels == sequence.ids


def test_labels_to_be_generated_leave_the_text_as_it_stands(write_jsonl, tokenizer):
    """In stages other than the scan, all tokens of plain text and the answers of conversations are labels."""
    path = write_jsonl("a.jsonl", [chat("question", "answer"), {"text": "plain"}])
    data = config_of(path, labels="generated", packing="single")
    conversation, plain = load_text(data, tokenizer, "calibration").sequences
    kept = [label for label in conversation.labels if label != -100]
    assert tokenizer.decode(kept) == "answer<|endoftext|>"
    assert plain.labels == plain.ids
    assert tokenizer.decode(plain.ids) == "plain<|endoftext|>"


@pytest.mark.parametrize("load", [load_text, load_prompts])
def test_a_token_without_an_embedding(write_jsonl, tokenizer, load):
    """As where the tokenizer of a fine-tuned model is put beside the weights of its base model."""
    tokenizer.add_tokens(["<|new|>"])
    path = write_jsonl("a.jsonl", [{"text": "one"}, {"text": "two <|new|>"}])
    data = config_of(path, packing="single")
    with pytest.raises(DataError) as caught:
        load(data, tokenizer, *(["calibration"] if load is load_text else []))
    assert caught.value.what == "the tokenizer makes token 4096, '<|new|>', and the model has 4096"


def test_a_tokenizer_whose_compiled_code_fails_is_an_error_of_the_text(tokenizer, monkeypatch):
    class PanicException(BaseException):
        pass

    def fail(*_words, **_options):
        raise PanicException("called `Result::unwrap()` on an `Err` value")

    monkeypatch.setattr(type(tokenizer), "__call__", fail)
    with pytest.raises(DataError, match="the tokenizer fails: called"):
        encode_document(Document("f:1", "text"), tokenizer, Source())


def test_further_text_begins_behind_the_text_that_was_read(write_jsonl, tokenizer):
    path = write_jsonl("text.jsonl", [{"text": f"number {number} of the documents"} for number in range(40)])
    config = config_of(path, tokens=61, max_length=9, packing="per_document")
    known = load_text(config, tokenizer, "calibration").sequences
    further = load_further(config, tokenizer, 50)
    everything = load_text(replace(config, tokens=9**9), tokenizer, "calibration").sequences
    assert everything[: len(known) - 1] == known[:-1]  # the last is cut
    assert everything[len(known) : len(known + further) - 1] == further[:-1]
    assert 40 <= sum(len(sequence.ids) for sequence in further) <= 50
    assert len(load_further(config, tokenizer, 9**9)) == 40 - len(known)
    assert not load_further(replace(config, tokens=9**9), tokenizer, 50)


def test_further_text_of_every_source(write_jsonl, tokenizer):
    records = {word: [{"text": f"{word} {number} " * 3} for number in range(60)] for word in ("one", "two")}
    sources = [SourceConfig(path=str(write_jsonl(f"{word}.jsonl", each)), share=0.5) for word, each in records.items()]
    config = DataConfig(kind="mixture", sources=sources, tokens=200, max_length=20, heldout_share=1e-9)
    known, further = load_text(config, tokenizer, "calibration").sequences, load_further(config, tokenizer, 100)
    assert {sequence.source for sequence in further} == {sequence.source for sequence in known}
    assert not {tuple(sequence.ids) for sequence in further} & {tuple(sequence.ids) for sequence in known}
    assert 60 <= sum(len(sequence.ids) for sequence in further) <= 100


def test_a_fault_behind_the_text_is_a_warning(tmp_path, tokenizer, caplog):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "some words of a document"}\n' * 20 + "no record\n")
    config = config_of(path, tokens=30, max_length=9, packing="per_document")
    assert load_text(config, tokenizer, "calibration").tokens == 30
    assert load_further(config, tokenizer, 9**6) == []
    assert "no text behind the first 30 tokens" in caplog.text


def test_records_whose_text_is_in_another_column_are_counted_and_named(write_jsonl, tokenizer):
    records = [{"text": "some words"}, {"text": "", "content": "lost"}, {"text": " "}, {"messages": [], "text": None}]
    path = write_jsonl("a.jsonl", records)
    text = load_text(DataConfig(kind="text", path=str(path), heldout_share=0.0), tokenizer, "calibration")
    assert text.skipped == {"their text is in other columns than those that are read": [f"{path}:2 with content"]}
