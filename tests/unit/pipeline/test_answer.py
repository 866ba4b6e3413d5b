"""`answer`: a model's own answers as text; what is kept, left out and written on, on the embedded model."""

import json

import pytest

from models.config import ModelConfig
from models.loading import load_dense, load_tokenizer
from models.source import EMBEDDED
from pipeline import answer
from pipeline.greedy import Writer
from stages.text.config import DataConfig
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

    def read(writer, prompt, row, ends, stop):
        said, tokens, _ = plain(writer, prompt, row, ends, stop)
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
        assert last == {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
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


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        ('{"messages": []}\n', 1, "not a file of answers"),
        ("text\u2028\n", 1, "not a file of answers"),
        ('{"model": "other", "question": "x"}\n', 2, "the answers are another model's"),
    ],
)
def test_a_file_of_others_is_not_touched(tmp_path, text, capsys, content, code, said):
    out = tmp_path / "own.jsonl"
    out.write_text(content)
    assert run(text, out) == code
    assert said in capsys.readouterr().err
    assert out.read_text() == content


def test_text_without_questions(tmp_path, capsys):
    (path := tmp_path / "plain.jsonl").write_text('{"text": "one two"}\n')
    assert run(path, tmp_path / "own.jsonl") == 1
    assert "no conversation with a question" in capsys.readouterr().err
    path.write_text('{"messages": 3}\n')
    assert run(path, tmp_path / "own.jsonl") == 1
    assert f"--text {path}" in capsys.readouterr().err


def test_what_the_template_refuses_and_what_is_too_long_is_left_out(tmp_path, text, ended, monkeypatch, capsys):
    monkeypatch.setattr(Writer, "reads", lambda *_: False)
    assert run(text, tmp_path / "own.jsonl", "--tokens", "9") == 0
    assert "3 refused by the chat template" in capsys.readouterr().out
    monkeypatch.setattr(Writer, "encode_question", lambda *_: [])
    assert run(text, tmp_path / "own.jsonl", "--tokens", "9") == 0
    assert "3 refused by the chat template" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(Writer, "longest", 20)
    assert run(text, tmp_path / "own.jsonl", "--tokens", "19") == 0
    assert "3 too long for the model" in capsys.readouterr().out
