"""Random tokens in addition to the text: which tokens are drawn, and how many layers they pass."""

import pytest
import torch
from pico import write_pico
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from models.source import EMBEDDED
from models.stream import LayerStream
from stages.calibration.batches import TokenStream, calibration_batches, draw_sequences
from stages.calibration.config import VocabularyConfig
from stages.text.batches import IGNORED
from stages.text.config import DataConfig

DATA = DataConfig(tokens=640, max_length=32)


def ids_of(sequences):
    return {id_ for sequence in sequences for id_ in sequence.ids}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED)


def test_as_many_tokens_as_asked_none_twice_and_always_the_same(tokenizer):
    drawn = draw_sequences(tokenizer, (), 1000, 64)
    assert [len(sequence.ids) for sequence in drawn] == [64] * 15 + [40]
    assert len(ids_of(drawn)) == 1000
    assert drawn == draw_sequences(tokenizer, (), 1000, 64)
    assert all(set(sequence.labels) == {IGNORED} for sequence in drawn)


def test_all_that_are_left_and_no_special_token(tokenizer):
    ids = set(tokenizer.get_vocab().values())
    left = ids - set(tokenizer.added_tokens_decoder)
    assert ids_of(draw_sequences(tokenizer, (), 10**6, 512)) == left
    met = sorted(left)[7:]
    assert ids_of(draw_sequences(tokenizer, met, 10**6, 512)) == set(sorted(left)[:7])
    assert draw_sequences(tokenizer, ids, 10**6, 512) == []


def test_every_sequence_starts_with_the_begin_token_of_the_tokenizer():
    """Like Gemma and Llama."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    begin, plain = tokenizer.bos_token_id, draw_sequences(tokenizer, (), 90, 30)
    tokenizer._tokenizer.post_processor = TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", begin)])
    drawn = draw_sequences(tokenizer, (), 90, 31)
    assert [sequence.ids for sequence in drawn] == [[begin, *sequence.ids] for sequence in plain]
    assert all(set(sequence.labels) == {IGNORED} for sequence in drawn)


def test_the_text_comes_first_and_is_what_it_was(tokenizer):
    plain = calibration_batches(DATA, VocabularyConfig(tokens=0), tokenizer, 4096)
    mixed = calibration_batches(DATA, VocabularyConfig(tokens=320, layers=2), tokenizer, 4096)
    assert sum(batch.tokens for batch in plain) == 640
    text = [batch for batch in mixed if batch.is_text]
    assert [batch.names for batch in text] == [batch.names for batch in plain]
    assert mixed[: len(plain)] == text
    drawn = mixed[len(plain) :]
    assert sum(batch.tokens for batch in drawn) == 320
    assert {batch.layers for batch in drawn} == {2}
    assert max(batch.input_ids.numel() for batch in mixed) <= 640 // 16


def test_no_more_are_drawn_than_the_text_has_and_none_that_it_has(tokenizer):
    batches = calibration_batches(DATA, VocabularyConfig(tokens=10**6), tokenizer, 4096)
    assert sum(batch.tokens for batch in batches if not batch.is_text) == 640
    met, drawn = (
        {int(id_) for batch in batches if batch.is_text == text for id_ in batch.input_ids[batch.attention_mask.bool()]}
        for text in (True, False)
    )
    assert not met & drawn


@pytest.mark.parametrize("layers", [1, 2, None])
def test_they_pass_so_many_layers_and_the_text_passes_all(tokenizer, tmp_path, layers):
    folder = write_pico(tmp_path / "pico", "qwen3", layers=3, hidden=24, intermediate=40, tokenizer=True)
    batches = calibration_batches(DATA, VocabularyConfig(tokens=96, layers=layers), tokenizer, 4096)
    with LayerStream(folder, device=torch.device("cpu")) as stream:
        alone, mixed = (TokenStream(stream, given) for given in ([b for b in batches if b.is_text], batches))
        for index, layer in enumerate(stream.layers()):
            alone.enter(layer)
            mixed.enter(layer)
            assert sum(map(len, mixed.inputs)) == 640 + (96 if layers is None or index < layers else 0)
            assert len(mixed.inputs.sources) == len(alone.inputs.sources) == len(alone.inputs)
            for text_TD, same_TD in zip(alone.inputs, mixed.inputs, strict=False):
                torch.testing.assert_close(text_TD, same_TD)
            for tokens in (alone, mixed):
                tokens.leave(map(layer.ffn, tokens.inputs))
