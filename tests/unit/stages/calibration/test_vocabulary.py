"""Random tokens beside the text: which are drawn, and how long they stay."""

from collections import Counter

import pytest
import torch
from transformers import AutoTokenizer

from models.pico import write_pico
from models.source import EMBEDDED
from models.stream import LayerStream
from stages.calibration.batches import calibration_batches, text_only
from stages.calibration.config import VocabularyConfig
from stages.calibration.token_stream import TokenStream
from stages.calibration.vocabulary import draw_sequences
from stages.data.config import DataConfig
from stages.data.encoding import IGNORED

DATA = DataConfig(tokens=640, max_length=32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED)


def test_as_many_tokens_as_asked_and_always_the_same(tokenizer):
    drawn = draw_sequences(tokenizer, 1000, 64)
    assert [len(sequence.ids) for sequence in drawn] == [64] * 15 + [40]
    assert drawn == draw_sequences(tokenizer, 1000, 64)
    assert all(set(sequence.labels) == {IGNORED} for sequence in drawn)


def test_no_special_token_is_drawn_and_common_ones_are_drawn_more_often(tokenizer):
    counts = Counter(id_ for sequence in draw_sequences(tokenizer, 200_000, 512) for id_ in sequence.ids)
    ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder))
    assert set(counts) == set(ids)
    quarter = len(ids) // 4
    first, last = (sum(counts[id_] for id_ in part) for part in (ids[:quarter], ids[-quarter:]))
    ranks = torch.arange(len(ids), dtype=torch.float64)
    weights = 1 / (ranks + 1000)
    assert first / last == pytest.approx(float(weights[:quarter].sum() / weights[-quarter:].sum()), rel=0.05)


def test_the_text_comes_first_and_is_what_it_was(tokenizer):
    plain = calibration_batches(DATA, None, tokenizer, 4096)
    mixed = calibration_batches(DATA, VocabularyConfig(tokens=320, layers=2), tokenizer, 4096)
    assert sum(batch.tokens for batch in plain) == 640
    assert [batch.names for batch in text_only(mixed)] == [batch.names for batch in plain]
    assert mixed[: len(plain)] == text_only(mixed)
    drawn = mixed[len(plain) :]
    assert sum(batch.tokens for batch in drawn) == 320
    assert {batch.layers for batch in drawn} == {2}
    assert max(batch.input_ids.numel() for batch in mixed) <= 640 // 16


def test_none_are_drawn_where_none_are_asked_for(tokenizer):
    assert all(batch.is_text for batch in calibration_batches(DATA, VocabularyConfig(tokens=0), tokenizer, 4096))


@pytest.mark.parametrize("layers", [1, 2, None])
def test_they_pass_so_many_layers_and_the_text_passes_all(tokenizer, tmp_path, layers):
    folder = write_pico(tmp_path / "pico", "qwen3", layers=3, hidden=24, intermediate=40, tokenizer=True)
    batches = calibration_batches(DATA, VocabularyConfig(tokens=96, layers=layers), tokenizer, 4096)
    with LayerStream(folder, device=torch.device("cpu")) as stream:
        alone, mixed = TokenStream(stream, text_only(batches)), TokenStream(stream, batches)
        for index, layer in enumerate(stream.layers()):
            alone.enter(layer)
            mixed.enter(layer)
            assert sum(map(len, mixed.inputs)) == 640 + (96 if layers is None or index < layers else 0)
            for text_TD, same_TD in zip(alone.inputs, mixed.inputs, strict=False):
                torch.testing.assert_close(text_TD, same_TD)
            for tokens in (alone, mixed):
                tokens.leave(map(layer.ffn, tokens.inputs))
