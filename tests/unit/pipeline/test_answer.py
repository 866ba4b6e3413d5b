"""`answer`: a model's own answers as text; what is kept, left out and written on, on the embedded model."""

import json
import shutil
from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from models.config import ModelConfig
from models.loading import load_dense, load_tokenizer
from models.source import EMBEDDED
from pipeline import answer, generate
from pipeline.greedy import Writer
from stages.text.chat import encode_conversation
from stages.text.config import DataConfig, Source
from stages.text.documents import Document
from stages.text.sequences import load_text

ASKED = [[{"role": "user", "content": f"What is {thing}?"}] for thing in ("a crab", "a neuron", "an expert")]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "chats.jsonl"
    old = [{"role": "assistant", "content": "It is old."}]
    records = [*(asked + old for asked in ASKED), ASKED[0] + old[:1] * 2, old]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in records))
    return path


@pytest.fixture
def ended(monkeypatch):
    """The model ends every answer but those in this list; the embedded one seldom ends any."""
    cut = []

    def read(writer, prompt, *rest):
        said, tokens, _ = plain(writer, prompt, *rest)
        return said, tokens, not any(word in writer.tokenizer.decode(prompt) for word in cut)

    plain = Writer._read
    monkeypatch.setattr(Writer, "_read", read)
    return cut


def run(text, out, *words):
    return answer.main([str(EMBEDDED), "--text", str(text), "--out", str(out), "--device", "cpu", *words])


def records(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_answers_are_the_model_s_and_are_read_as_text(tmp_path, text, ended, capsys):
    out = tmp_path / "own.jsonl"
    ended.append("neuron")
    assert run(text, out, "--tokens", "9") == 0
    said = capsys.readouterr().out
    assert said == (
        f"2 answers in {out}; left out: 1 the same question again; 1 no conversation with a question; "
        "1 no end within --tokens\n"
    )
    assert [record["messages"][:-1] for record in records(out)] == [ASKED[0], ASKED[2]]
    tokenizer = load_tokenizer(EMBEDDED, trust_remote_code=False)
    model = load_dense(ModelConfig(kind="local", path=str(EMBEDDED), dtype="float32"), EMBEDDED)
    for record in records(out):
        *asked, last = record["messages"]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
        ids = model.generate(**prompt, max_new_tokens=9, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert last == {"role": "assistant", "content": tokenizer.decode(ids)}
    data = DataConfig(kind="text", path=str(out), heldout_share=0.0, packing="single", labels="completion")
    assert len(load_text(data, tokenizer, "calibration").sequences) == 2


def test_a_killed_run_goes_on_and_asks_again_what_had_no_end(tmp_path, text, ended, monkeypatch):
    whole, out, asked = tmp_path / "whole.jsonl", tmp_path / "own.jsonl", []
    assert run(text, whole, "--tokens", "9") == 0
    write = Writer.write

    def interrupted(writer, prompts, *rest):
        asked.extend(prompts)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return write(writer, prompts, *rest)

    monkeypatch.setattr("pipeline.greedy.AT_ONCE", 1)
    monkeypatch.setattr(Writer, "write", interrupted)
    assert run(text, out, "--tokens", "9") == 130
    assert records(out) == records(whole)[:1]
    assert run(text, out, "--tokens", "9") == 0
    assert out.read_text() == whole.read_text()
    assert len(asked) == 4
    monkeypatch.setattr("pipeline.greedy.open_writer", lambda *_: pytest.fail("nothing is left to answer"))
    assert run(text, out, "--tokens", "9") == 0


def test_a_model_none_of_whose_answers_are_text_is_not_asked_on(tmp_path, text, ended, monkeypatch, capsys):
    ended.append("What")
    monkeypatch.setattr("pipeline.greedy.AT_ONCE", 1)
    monkeypatch.setattr(answer, "IN_VAIN", 2)
    assert run(text, tmp_path / "own.jsonl", "--tokens", "9") == 1
    assert "2 no end within --tokens" in capsys.readouterr().err


def test_questions_do_not_read_the_model_s_folder_again(monkeypatch):
    writer, read = Writer(None, load_tokenizer(EMBEDDED, trust_remote_code=False)), []
    monkeypatch.setattr("models.loading.read_config", lambda folder: read.append(folder) or {})
    for messages in ASKED:
        assert writer.encode_question(Document("", messages=tuple(messages)))
    assert len(read) == 1


def test_special_tokens_of_an_answer_are_kept():
    """Like Mistral: a special token begins a call of a tool."""
    writer = Writer(None, load_tokenizer(EMBEDDED, trust_remote_code=False))
    prompt = writer.encode_question(Document("", messages=tuple(ASKED[0])))
    row = [1, *writer.tokenizer("call(7)")["input_ids"], 0]
    assert writer._read(prompt, row, {0}, "")[0] == "call(7)"
    said, tokens, ended = replace(writer, special=True)._read(prompt, row, {0}, "")
    assert (said, tokens, ended) == ("<|user|>call(7)", len(row), True)
    answered = Document("", messages=(*ASKED[0], {"role": "assistant", "content": said}))
    assert encode_conversation(answered, writer.tokenizer, Source())[0] == prompt + row


TURNS = "{% for m in messages %}<|{{ m.role }}|> {{ CONTENT }}{{ eos_token }}{% endfor %}"
OPENED = TURNS + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
THOUGHT = TURNS + "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"


@pytest.mark.parametrize(
    ("template", "said", "kept"),
    [
        (OPENED.replace("CONTENT", "m.content | trim"), "\nYes.", True),
        (OPENED.replace("CONTENT", "m.content | upper"), "Yes.", False),
        (OPENED.replace("CONTENT", "m.content.split('</think>')[-1]"), "<think>Hm.</think>Yes.", False),
        (THOUGHT.replace("CONTENT", "m.content"), "Hm.</think>Yes.", False),  # OLMo 3 Think
        (THOUGHT.replace("CONTENT", "'<think>' * (m.role == 'assistant') + m.content"), "Hm.</think>Yes.", True),
    ],
)
def test_an_answer_that_the_template_changes_is_left_out(template, said, kept):
    writer = Writer(None, load_tokenizer(EMBEDDED, trust_remote_code=False))
    writer.tokenizer.chat_template = template
    joined = writer.join(Document("", messages=tuple(ASKED[0])), said)
    assert (joined and joined.messages) == ((*ASKED[0], {"role": "assistant", "content": said}) if kept else None)


def test_a_name_by_which_the_answers_would_not_be_read(tmp_path, text, capsys):
    assert run(text, tmp_path / "own.txt") == 2
    assert f"  do:    --out {tmp_path / 'own.jsonl'}" in capsys.readouterr().err
    assert not (tmp_path / "own.txt").exists()


def test_text_without_questions(tmp_path, capsys):
    (path := tmp_path / "plain.jsonl").write_text('{"text": "one two"}\n')
    assert run(path, tmp_path / "own.jsonl") == 1
    assert "no conversation with a question" in capsys.readouterr().err
    path.write_text('{"messages": 3}\n')
    assert run(path, tmp_path / "own.jsonl") == 1
    assert f"--text {path}" in capsys.readouterr().err


def test_what_the_template_refuses_and_what_is_too_long_is_left_out(tmp_path, text, ended, monkeypatch, capsys):
    monkeypatch.setattr(Writer, "join", lambda *_: None)
    assert run(text, tmp_path / "own.jsonl", "--tokens", "9") == 1
    assert "3 changed by the chat template, or without an embedding" in capsys.readouterr().err
    monkeypatch.setattr(Writer, "encode_question", lambda *_: [])
    assert run(text, tmp_path / "own.jsonl", "--tokens", "9") == 1
    assert "3 changed by the chat template, or without an embedding" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(Writer, "longest", 20)
    assert run(text, tmp_path / "own.jsonl", "--tokens", "19") == 1
    assert "3 too long for the model" in capsys.readouterr().err
    assert not (tmp_path / "own.jsonl").exists()


def test_questions_begin_as_texts_do_and_have_no_token_without_an_embedding(tmp_path, ended, capsys):
    """Like TinyLlama: the tokenizer adds a begin token, and the chat template does not."""
    model, out, asked = tmp_path / "model", tmp_path / "own.jsonl", tmp_path / "chats.jsonl"
    shutil.copytree(EMBEDDED, model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    begin = tokenizer.id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 0)])
    tokenizer.add_special_tokens([AddedToken("<image>", normalized=False)])
    tokenizer.save(str(model / "tokenizer.json"))
    writer = Writer(None, load_tokenizer(model, trust_remote_code=False))
    question = Document("", messages=tuple(ASKED[0]))
    assert writer.encode_question(question) == writer.encode("What is a crab?", chat=True)
    assert writer.encode_question(question)[0] == 0
    records = ({"messages": [{"role": "user", "content": text}]} for text in ("What is <image>?", "What is a crab?"))
    asked.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = [str(model), "--text", str(asked), "--out", str(out), "--device", "cpu", "--tokens", "9"]
    assert answer.main(words) == 0
    assert "1 answers" in (said := capsys.readouterr().out)
    assert "1 changed by the chat template, or without an embedding" in said
    assert generate.main([str(model), "<image>", "--device", "cpu"]) == 1
    assert "'<image>', and the model has 4096" in capsys.readouterr().err
