import logging
from copy import deepcopy
from dataclasses import dataclass
from threading import Barrier, Thread

import pytest
import torch
from pico import write_pico
from transformers import AutoModelForCausalLM, AutoTokenizer

from instruments.errors import DataError
from models.source import EMBEDDED
from stages.artifacts.job import Workers
from stages.text.batches import TokenSequence
from stages.text.config import DataConfig
from stages.text.generated import continue_prompts, load_prompts
from stages.text.sequences import LoadedText

DATA = DataConfig(labels="generated", tokens=140, max_length=40, prompt_tokens=11, max_new_tokens=6)


@pytest.fixture(scope="module")
def embedded_model():
    return AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()


def prompts_of(*lengths):
    """Different prompts of the given lengths."""
    rows = [[17 * number + 5 * place + 7 for place in range(length)] for number, length in enumerate(lengths)]
    named = [TokenSequence(f"p{number}", ids, [-100] * len(ids)) for number, ids in enumerate(rows)]
    return LoadedText(named, {"too dull": ["x", "y"]})


def write(model, tokenizer, prompts, data=DATA, **options):
    return continue_prompts(model, tokenizer, prompts, data, **({"seed": 0, "batch_tokens": 70} | options))


LENGTHS = (5, 9, 3, 11, 7, 2, 8, 4, 6, 10, 5, 12, 3, 9, 7, 6)


def test_only_what_was_written_counts(embedded_model, tokenizer):
    prompts = prompts_of(*LENGTHS)
    text = write(embedded_model, tokenizer, prompts)
    # The remaining tokens are too few for the next prompt and one label.
    assert 0 < 140 - text.tokens <= len(prompts.sequences[len(text.sequences)].ids)
    for prompt, sequence in zip(prompts.sequences, text.sequences, strict=False):
        assert sequence.name == prompt.name
        assert sequence.ids[: len(prompt.ids)] == prompt.ids
        assert sequence.labels == [-100] * len(prompt.ids) + sequence.ids[len(prompt.ids) :]
        assert len(sequence.ids) <= len(prompt.ids) + 6
    assert text.skipped == {"too dull": ["x", "y"]}


def test_the_model_finds_what_it_wrote_likely(embedded_model, tokenizer):
    """With teacher forcing on its greedy text, the model gives every labelled token the highest logit."""
    text = write(embedded_model, tokenizer, load_prompts(DATA, tokenizer))
    for sequence in text.sequences:
        with torch.no_grad():
            logits = embedded_model(torch.tensor([sequence.ids])).logits[0, :-1]
        labels = torch.tensor(sequence.labels[1:])
        assert logits.argmax(1)[labels != -100].equal(labels[labels != -100])


@pytest.mark.parametrize("batch_tokens", [1, 40, 1000])
def test_greedy_text_does_not_depend_on_the_batches(embedded_model, tokenizer, batch_tokens):
    data = DataConfig(**vars(DATA) | {"tokens": 90})
    prompts = prompts_of(*LENGTHS)
    expected = write(embedded_model, tokenizer, prompts, data)
    assert write(embedded_model, tokenizer, prompts, data, batch_tokens=batch_tokens) == expected


def test_drawn_text_is_the_same_again(embedded_model, tokenizer):
    """A resumed scan generates its text again and relies on equal batches."""
    data = DataConfig(**vars(DATA) | {"temperature": 1.0})
    drawn = write(embedded_model, tokenizer, prompts_of(*LENGTHS), data, seed=3)
    torch.rand(1)
    assert write(embedded_model, tokenizer, prompts_of(*LENGTHS), data, seed=3) == drawn
    assert write(embedded_model, tokenizer, prompts_of(*LENGTHS), data, seed=4) != drawn


@dataclass(frozen=True)
class Threads(Workers):
    """Workers as threads of this process."""

    board: tuple = ()
    meeting: Barrier | None = None

    def gather(self, value):
        self.board[self.rank].append(value)
        self.meeting.wait()
        values = [values[-1] for values in self.board]
        self.meeting.wait()
        return values


@pytest.mark.parametrize("world", [2, 3])
def test_the_text_does_not_depend_on_the_workers(embedded_model, tokenizer, world):
    prompts = prompts_of(*LENGTHS)
    expected = write(embedded_model, tokenizer, prompts)
    board, meeting = tuple([] for _ in range(world)), Barrier(world, timeout=60)
    found, models = {}, [deepcopy(embedded_model) for _ in range(world)]

    def work(rank):
        workers = Threads(rank, world, rank, world, board, meeting)
        found[rank] = write(models[rank], tokenizer, prompts, workers=workers)

    threads = [Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(world), expected)
    assert all(sum(map(len, parts)) > 0 for parts in board), "every worker wrote a part of it"


@pytest.fixture(scope="module")
def ending_model(tmp_path_factory):
    """A model whose next token depends on the last token alone; after tokens 100 to 199 the text ends."""
    folder = write_pico(tmp_path_factory.mktemp("ending"), "qwen3", tokenizer=True, hidden=32)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # After tokens 100 to 199 the end has logit 0 and all others have negative logits.
        model.lm_head.weight.fill_(-1.0)
        model.lm_head.weight[0] = 0.0
        model.lm_head.weight[300] = 2.0
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.fill_(1.0)  # token 300 follows all other tokens
        model.model.embed_tokens.weight[100:200] = -1.0
        model.model.embed_tokens.weight[100:200, 1:] = 0.0
        model.model.embed_tokens.weight[100:200, 0] = 1.0
        model.lm_head.weight[300, 0] = -1.0
    return model, AutoTokenizer.from_pretrained(folder)


def named(*prompts):
    return LoadedText([TokenSequence(f"p{ids}", ids, [-100] * len(ids)) for ids in prompts], {})


def test_a_prompt_after_which_nothing_is_written_is_counted_and_named(ending_model, caplog):
    model, tokenizer = ending_model
    with caplog.at_level(logging.INFO):
        text = write(model, tokenizer, named([5, 120], [5, 6, 7], [150]))
    assert [sequence.name for sequence in text.sequences] == ["p[5, 6, 7]"]
    assert text.sequences[0].ids == [5, 6, 7] + [300] * 6
    assert text.skipped == {"the model ended the text at once": ["p[5, 120]", "p[150]"]}
    assert caplog.messages == [
        "generated text: skipped 2 sequences (the model ended the text at once: p[5, 120], p[150])",
        "generated text: 9 of 140 tokens, 1 sequences",
    ]


def test_nothing_written_at_all(ending_model):
    model, tokenizer = ending_model
    with pytest.raises(DataError) as caught:
        write(model, tokenizer, named([5, 120], [150]))
    assert str(caught.value).startswith("the model ended the text at once after each of 2 prompts")
