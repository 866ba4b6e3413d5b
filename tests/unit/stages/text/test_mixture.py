"""Several sources in one text: shares, order and settings."""

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from stages.text.config import DataConfig, SourceConfig, list_sources
from stages.text.sequences import load_text

WORDS = {"chats": "hello friend", "web": "page of prose"}


@pytest.fixture
def files(tmp_path, write_jsonl):
    for name, words in WORDS.items():
        write_jsonl(f"{name}.jsonl", [{"text": f"{words} {number} " * 40} for number in range(60)])
    return tmp_path


def mixture(folder, shares=(0.75, 0.25), **settings):
    paths = zip(WORDS, shares, strict=True)
    sources = [SourceConfig(path=str(folder / f"{name}.jsonl"), share=share) for name, share in paths]
    return DataConfig(**{"kind": "mixture", "sources": sources, "tokens": 8192, "max_length": 64} | settings)


def test_every_beginning_holds_the_sources_by_their_shares(files, tokenizer):
    sequences = load_text(mixture(files), tokenizer, "calibration").sequences
    seen = {"chats": 0, "web": 0}
    for sequence in sequences:
        seen[Path(sequence.source).stem] += len(sequence.ids)
        assert abs(seen["chats"] - 0.75 * sum(seen.values())) <= 64
    assert sum(seen.values()) == pytest.approx(8192, abs=64)
    assert all(WORDS[Path(found.source).stem].split()[0] in tokenizer.decode(found.ids) for found in sequences)
    assert max(Counter(found.name for found in sequences if "web" in found.source).values()) == 1


def test_heldout_text_is_of_the_sources_or_of_the_file_that_is_named(files, tokenizer):
    settings = mixture(files, heldout_tokens=512, heldout_share=0.3)
    held = load_text(settings, tokenizer, "heldout").sequences
    assert {Path(found.source).stem for found in held} == {"chats", "web"}
    known = {tuple(found.ids) for found in load_text(settings, tokenizer, "calibration").sequences}
    assert not known & {tuple(found.ids) for found in held}
    (files / "other.txt").write_text("quite another text " * 400)
    named = mixture(files, heldout_tokens=512, heldout_path=str(files / "other.txt"))
    (text, *_) = load_text(named, tokenizer, "heldout").sequences
    assert "another" in tokenizer.decode(text.ids)


def test_what_one_source_holds_out_is_in_no_calibration_text(files, tokenizer):
    settings = mixture(files, (0.5, 0.5), packing="single", heldout_tokens=4096)
    settings.sources[1].path, settings.sources[1].heldout_share = settings.sources[0].path, 0.5
    held, known = (
        {tuple(found.ids) for found in load_text(settings, tokenizer, split).sequences}
        for split in ("heldout", "calibration")
    )
    assert len(held) > 15
    assert not known & held
    assert {source.heldout_share for source in list_sources(settings, "calibration")} == {0.5}


def test_a_source_has_settings_of_its_own_and_others_of_data(files):
    ignored = {"path": "p", "name": "n", "subset": "s", "revision": "r", "heldout_split": "h"}
    settings = mixture(files, packing="single", **ignored)
    settings.sources[1].packing = "packed"
    settings.sources.append(SourceConfig(name="some/books", split="all", share=0.1))
    chats, web, books = list_sources(settings, "calibration")
    assert [source.packing for source in (chats, web, books)] == ["single", "packed", "single"]
    assert [source.tokens for source in (chats, web, books)] == [6144, 2048, 819]
    assert (books.kind, books.split, books.place, books.title) == ("hub", "all", "data.sources.2", "some/books[all]")
    assert replace(books, subset="en").title == "some/books, en[all]"
    for source, taken in zip((chats, web, books), ("path", "path", "name"), strict=True):
        assert [name for name in ignored if getattr(source, name) is not None] == [taken]


def test_a_source_that_misses_its_share_is_named(files, tokenizer, caplog):
    with caplog.at_level(logging.WARNING):  # its file is too short
        load_text(mixture(files, (0.2, 0.8), tokens=40_000), tokenizer, "calibration")
    assert any("web.jsonl has" in message for message in caplog.messages)


def test_small_shares_read_no_more_than_theirs(files, tokenizer):
    """Less than one sequence each."""
    text = load_text(mixture(files, (0.95, 0.05), tokens=640), tokenizer, "calibration")
    assert text.tokens == 640
    whole = mixture(files, (0.95, 0.05), tokens=640, packing="single")
    assert [source.tokens for source in list_sources(whole, "calibration")] == [608, 64]  # one sequence


def test_the_standard_library_is_a_source(files, tokenizer):
    settings = mixture(files, (0.5, 0.3), heldout_tokens=2048)
    settings.sources.append(SourceConfig(python_stdlib=True, share=0.2))
    for split in ("calibration", "heldout"):
        text = load_text(settings, tokenizer, split)
        own = [sequence for sequence in text.sequences if sequence.source == "the Python standard library"]
        assert sum(len(found.ids) for found in own) == pytest.approx(0.2 * text.tokens, abs=2 * settings.max_length)
    settings.heldout_path = settings.sources[1].path
    assert list_sources(settings, "calibration")[2].heldout_share == settings.heldout_share
