import logging

import pytest
from tokenizers.processors import TemplateProcessing

from instruments.errors import DataError
from stages.text.config import DataConfig
from stages.text.generated import load_prompts


def config_of(path, **settings):
    settings = {"max_length": 64, "max_new_tokens": 16, "prompt_tokens": 6} | settings
    return DataConfig(kind="text", path=str(path), labels="generated", **settings)


def ask(question, *answers):
    return {
        "messages": [{"role": "user", "content": question}, *({"role": "assistant", "content": a} for a in answers)]
    }


@pytest.fixture(autouse=True)
def _no_heldout(monkeypatch):
    """All text is calibration text, as with a tiny held-out share."""
    monkeypatch.setattr("stages.text.documents.is_heldout", lambda digest, share: False)


def test_plain_text_gives_its_first_tokens_and_no_end(write_jsonl, tokenizer):
    long = "one two three four five six seven eight nine ten"
    path = write_jsonl("a.jsonl", [{"text": long}, {"text": "two"}])
    text = load_prompts(config_of(path), tokenizer)
    assert [prompt.name for prompt in text.sequences] == [f"{path}:1", f"{path}:2"]
    assert [prompt.ids for prompt in text.sequences] == [
        tokenizer(long)["input_ids"][:6],
        tokenizer("two")["input_ids"],
    ]
    assert [prompt.labels for prompt in text.sequences] == [[-100] * len(prompt.ids) for prompt in text.sequences]
    assert text.skipped == {}


def test_a_paragraph_keeps_its_blank_line(write_jsonl, tokenizer):
    path = write_jsonl("a.jsonl", [{"text": "two"}])
    (prompt,) = load_prompts(config_of(path, separator="blank_line"), tokenizer).sequences
    assert tokenizer.decode(prompt.ids) == "two\n\n"


@pytest.mark.parametrize("separator", ["eos", "blank_line"])
def test_prompts_start_with_the_begin_token_of_the_tokenizer(write_jsonl, tokenizer, separator):
    """Like Gemma and Llama; the chat template of the tests writes none."""
    begin = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", begin)])
    path = write_jsonl("a.jsonl", [ask("How?", "So."), {"text": "one two three four five six seven eight"}])
    asked, plain = load_prompts(config_of(path, separator=separator), tokenizer).sequences
    assert tokenizer.decode(asked.ids) == "<|endoftext|><|user|>\nHow?\n<|assistant|>\n"
    assert plain.ids == tokenizer("one two three four five six seven")["input_ids"][:6]
    assert plain.ids.count(begin) == 1


def test_conversations_and_plain_text_may_mix(write_jsonl, tokenizer):
    path = write_jsonl("a.jsonl", [ask("How?", "So."), {"text": "two"}, ask("When?")])
    prompts = load_prompts(config_of(path), tokenizer).sequences
    assert [tokenizer.decode(prompt.ids) for prompt in prompts] == [
        "<|user|>\nHow?\n<|assistant|>\n",
        "two",
        "<|user|>\nWhen?\n<|assistant|>\n",
    ]


def test_what_makes_no_prompt_is_counted_and_named(write_jsonl, tokenizer, caplog):
    unasked = {"messages": [{"role": "assistant", "content": "So."}]}
    path = write_jsonl("a.jsonl", [unasked, ask("How? " * 40, "So."), ask("How?", "So."), unasked])
    with caplog.at_level(logging.WARNING):
        text = load_prompts(config_of(path), tokenizer)
    assert [prompt.name for prompt in text.sequences] == [f"{path}:3"]
    assert text.skipped == {
        "no text before the answer": [f"{path}:1", f"{path}:4"],
        "the prompt leaves data.max_length no room for data.max_new_tokens": [f"{path}:2"],
    }
    assert caplog.messages == [
        f"prompts: skipped 2 sequences (no text before the answer: {path}:1, {path}:4)",
        f"prompts: skipped 1 sequence (the prompt leaves data.max_length no room for data.max_new_tokens: {path}:2)",
    ]


def test_no_more_prompts_than_could_be_wanted(write_jsonl, tokenizer):
    path = write_jsonl("a.jsonl", [{"text": f"document number {number} of many"} for number in range(50)])
    prompts = load_prompts(config_of(path, tokens=65), tokenizer).sequences
    assert sum(len(prompt.ids) for prompt in prompts[:-1]) < 65 <= sum(len(prompt.ids) for prompt in prompts)


def test_no_prompt_at_all(write_jsonl, tokenizer):
    path = write_jsonl("a.jsonl", [ask("How? " * 40), ask("When? " * 40)])
    with pytest.raises(DataError) as caught:
        load_prompts(config_of(path), tokenizer)
    assert (
        caught.value.what
        == "no document makes a prompt; skipped: 2 (the prompt leaves data.max_length no room for data.max_new_tokens)"
    )
