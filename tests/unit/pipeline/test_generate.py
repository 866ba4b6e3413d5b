"""`generate`: what checkpoints write after a prompt, dense and carved."""

import pytest
import torch
from unit.pipeline.served_carves import write_carve

from models.source import EMBEDDED
from pipeline import generate
from pipeline.greedy import open_writer


@pytest.fixture(scope="module", params=["qwen2_moe", "tiny_onn"])
def carve(tmp_path_factory, request):
    source = {"qwen2_moe": "qwen2"}.get(request.param, "qwen3")
    return write_carve(tmp_path_factory.mktemp("carve"), request.param, source, 64)


def test_a_batch_with_padding_writes_what_single_prompts_write(carve):
    with open_writer(carve, "cpu") as writer:
        prompts = [writer.encode("def carve(", chat=False), writer.encode("What is an expert?", chat=True)]
        single = [writer.write([prompt], 7)[0] for prompt in prompts]
        assert writer.write(prompts, 7) == single
        assert len(prompts[0]) != len(prompts[1])


def test_a_continuation_ends_at_a_stop_string(carve):
    with open_writer(carve, "cpu") as writer:
        opened = [writer.encode("What?", chat=True, opened=start) for start in ("", "def carve(")]
        assert opened[1][: len(opened[0])] == opened[0]
        assert writer.tokenizer.decode(opened[1][len(opened[0]) :]) == "def carve("
        (whole, tokens, ended), (other, *_) = writer.write(opened, 9)
        assert not ended
        stop = whole[len(whole) // 2 :][:1]
        assert stop not in other or other.index(stop) != whole.index(stop)
        cut, rest = writer.write(opened, 9, stop)
        assert cut == (whole[: whole.index(stop) + 1], cut[1], True)
        assert cut[1] < tokens
        assert rest[0] == (other.partition(stop)[0] + stop if stop in other else other)


def test_exact_is_fp32_on_a_gpu_too(monkeypatch):
    asked = []
    monkeypatch.setattr("pipeline.greedy.resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("pipeline.greedy.placement", lambda *_: {})
    monkeypatch.setattr("pipeline.greedy.load_whole", lambda *_, dtype, **__: asked.append(dtype))
    for exact in (False, True):
        with open_writer(EMBEDDED, exact=exact):
            pass
    assert asked == ["auto", torch.float32]


def test_a_full_gpu_gets_smaller_batches(carve, monkeypatch):
    monkeypatch.setattr("pipeline.greedy.is_launch_bound", lambda _: True)
    found = []
    with open_writer(carve, "cpu") as writer:
        for free in (None, 2**40, 2**33, 2**32):
            monkeypatch.setattr("pipeline.greedy.free_device_memory", lambda _, free=free: free)
            found.append(writer._tokens_at_once())
    assert found[0] == found[1] == 4 * found[2] == 8 * found[3] > 0


def test_an_opened_answer_stands_behind_the_thought(carve):
    """Like Qwen3.5: the generation prompt opens a thought, which an answer closes."""
    with open_writer(carve, "cpu") as writer:
        writer.tokenizer.chat_template = (
            "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think></think>{% endif %}"
            "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
        )
        said = writer.tokenizer.decode(writer.encode("What?", chat=True, opened="```python\n"))
        assert said == "<|user|>What?<|assistant|><think></think>```python\n"


def test_an_end_token_of_the_prompt_is_kept(carve):
    with open_writer(carve, "cpu") as writer:
        end = writer.tokenizer.eos_token
        assert writer.encode(f"a{end}", chat=False) == [*writer.encode("a", chat=False), writer.tokenizer.eos_token_id]


def test_the_text_follows_the_prompt_and_the_dense_model_comes_first(carve, capsys):
    words = [str(carve), "import ", "--tokens", "5", "--device", "cpu"]
    assert generate.main(words) == 0
    alone = capsys.readouterr().out
    assert alone.startswith("import ")
    assert len(alone) > len("import \n")
    assert generate.main([*words, "--dense", str(EMBEDDED)]) == 0
    both = capsys.readouterr().out
    assert both.startswith(f"{EMBEDDED}:\nimport ")
    assert both.endswith(f"\n{carve}:\n{alone}")


def test_a_message_is_answered_without_being_repeated(capsys):
    assert generate.main([str(EMBEDDED), "Say something.", "--chat", "--tokens", "5", "--device", "cpu"]) == 0
    said = capsys.readouterr().out.strip()
    assert said
    assert "Say something." not in said


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["{tmp_path}", "x"], 1),
        (["{embedded}", "x", "--dense", "{tmp_path}"], 1),
        (["{embedded}", " "], 2),
        (["{embedded}", "caf\udce9"], 2),
        (["{embedded}", "x", "--device", "tpu:"], 2),
    ],
)
def test_wrong_command_lines(tmp_path, words, code, capsys):
    given = [word.format(tmp_path=tmp_path, embedded=EMBEDDED) for word in words]
    assert generate.main(given) == code
    said = capsys.readouterr().err
    assert "  do:    " in said
    assert ("  do:    --device auto" in said) == ("--device" in words)
