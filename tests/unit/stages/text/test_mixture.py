"""Several sources in one text: shares, order and errors."""

import json
import logging
from pathlib import Path

import pytest

from instruments.errors import DataError
from stages.text.cache_key import check_data, data_cache_key
from stages.text.config import DataConfig, SourceConfig, list_sources, mixture_errors, name_source
from stages.text.sequences import interleave_shares, load_text

WORDS = {"chats": "hello friend", "web": "page of prose"}


@pytest.fixture
def files(tmp_path):
    for name, words in WORDS.items():
        records = [json.dumps({"text": f"{words} {number} " * 40}) for number in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(records))
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
    with_own, without = (load_text(data, tokenizer, "calibration").sequences for data in (named, settings))
    assert len(with_own) == len(without)


def test_a_source_does_not_take_what_a_mixture_ignores(files):
    ignored = {"path": "p", "name": "n", "subset": "s", "revision": "r", "heldout_split": "h"}
    settings = mixture(files, **ignored)
    settings.sources.append(SourceConfig(name="some/books", share=0.1))
    for source, taken in zip(list_sources(settings), ("path", "path", "name"), strict=True):
        found = {name: getattr(source.data, name) for name in ignored}
        assert found == dict.fromkeys(ignored) | {taken: source.name}


def hub_mixture(tmp_path, heldout):
    """20 documents in a dataset whose column is `body`, with a held-out file whose column is `text`."""
    folder = tmp_path / "books"
    folder.mkdir()
    records = [json.dumps({"body": f"book {number}"}) for number in range(20)]
    (folder / "train.jsonl").write_text("\n".join(records))
    (tmp_path / "heldout.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in heldout))
    return DataConfig(
        kind="mixture",
        sources=[SourceConfig(name=str(folder), text_column="body", packing="single")],
        heldout_path=str(tmp_path / "heldout.jsonl"),
        heldout_share=0.5,
    )


def test_a_dataset_keeps_all_but_the_documents_of_the_heldout_file(tmp_path, tokenizer):
    pytest.importorskip("datasets", reason="the optional extra hub is not installed")
    data = hub_mixture(tmp_path, ["book 3", "another text"])
    assert messages(data) == []
    texts = [
        tokenizer.decode(found.ids, skip_special_tokens=True)
        for found in load_text(data, tokenizer, "calibration").sequences
    ]
    assert texts == [f"book {number}" for number in range(20) if number != 3]
    assert len(load_text(data, tokenizer, "heldout").sequences) == 1


def test_a_dataset_of_held_out_documents_only(tmp_path, tokenizer):
    pytest.importorskip("datasets", reason="the optional extra hub is not installed")
    data = hub_mixture(tmp_path, [f"book {number}" for number in range(20)])
    with pytest.raises(DataError) as caught:
        load_text(data, tokenizer, "calibration")
    assert (
        caught.value.what == "no document is left for the calibration text: all of them also occur in the held-out text"
    )


def test_a_source_has_settings_of_its_own(files):
    settings = mixture(files)
    settings.sources[1].packing = "single"
    settings.sources.append(SourceConfig(name="some/books", split="all", share=0.1))
    chats, web, books = list_sources(settings)
    assert (chats.data.packing, web.data.packing) == ("packed", "single")
    assert (chats.data.tokens, web.data.tokens, books.data.tokens) == (6144, 2048, 819)
    assert (books.data.kind, books.data.name, books.data.split) == ("hub", "some/books", "all")


def test_a_source_that_falls_short_is_named(files, tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        load_text(mixture(files, tokens=60_000), tokenizer, "calibration")
    assert "chats.jsonl has" in caplog.text
    assert "of the 45000 that are its share" in caplog.text


def test_a_share_of_less_than_one_sequence_is_named(files, tokenizer, caplog):
    """The text then holds more of the source, and more tokens, than the settings say."""
    with caplog.at_level(logging.WARNING):
        sequences = load_text(mixture(files, (0.95, 0.05), tokens=640), tokenizer, "calibration").sequences
    assert sum(len(found.ids) for found in sequences) == 608 + 64
    assert caplog.messages == [
        f"calibration text: source {files / 'web.jsonl'} has 64 tokens, and its share is 32: less than one sequence of "
        "data.max_length"
    ]


def test_a_language_that_the_tokenizer_does_not_know(files, tokenizer, caplog):
    (files / "web.jsonl").write_text("\n".join(json.dumps({"text": "ዓለም ሁሉ " * 200 + str(i)}) for i in range(40)))
    load_text(mixture(files), tokenizer, "calibration")
    (said,) = [message for message in caplog.messages if "the model hardly knows its language" in message]
    assert "web.jsonl" in said


def test_short_chats_are_no_unknown_language(tmp_path, tokenizer, caplog):
    """Most of their tokens are the template's."""
    chat = '{"messages": [{"role": "user", "content": "%d?"}, {"role": "assistant", "content": "%d"}]}'
    (tmp_path / "chats.jsonl").write_text("\n".join(chat % (number, number + 1) for number in range(60)))
    data = DataConfig(kind="text", path=str(tmp_path / "chats.jsonl"), max_length=64)
    with caplog.at_level(logging.WARNING):
        sequences = load_text(data, tokenizer, "calibration").sequences
    assert sum(len(found.ids) for found in sequences) > 60 * len("1?2")
    assert not caplog.messages


def test_identity_follows_the_content_of_every_source(files):
    before = data_cache_key(mixture(files))
    assert before == data_cache_key(mixture(files))
    with (files / "web.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"text": "one more"}))
    assert before != data_cache_key(mixture(files))


def messages(settings):
    return [str(error) for error in check_data(settings)]


def test_shares_that_do_not_sum(files):
    (error,) = messages(mixture(files, (0.75, 0.75)))
    assert error.startswith("the shares of data.sources are 0.75, 0.75: their sum is 1.5, not 1")
    assert "their sum is nan" in messages(mixture(files, (0.75, float("nan"))))[0]


def test_a_missing_or_an_empty_source(files):
    settings = mixture(files)
    settings.sources[1].path = gone = str(files / "gone.jsonl")
    (error,) = messages(settings)
    assert error.startswith(f"no file and no folder {gone}\n  where: data.sources.1.path, ")
    (files / "gone.jsonl").write_text("")
    (error,) = messages(settings)
    assert error.startswith(f"the text is empty\n  where: data.sources.1.path={gone}")


def test_a_fault_of_a_later_record_names_the_settings_of_its_source(files, tokenizer):
    with (files / "web.jsonl").open("a") as file:
        file.write('\n{"body": "x"}')
    settings = mixture(files, tokens=60_000)
    assert messages(settings) == []
    with pytest.raises(DataError) as caught:
        load_text(settings, tokenizer, "calibration")
    assert caught.value.do == "name the column: data.sources.1.text_column= or data.sources.1.messages_column="


def test_a_source_that_holds_out_its_calibration_text_or_nothing(files):
    """The held-out text would be the calibration text, and every loss too low."""
    settings = mixture(files, (0.5, 0.3), split="books")
    settings.sources[0].heldout_share = 0.0
    settings.sources.append(SourceConfig(name="some/dataset", share=0.2, heldout_split="books"))
    same = "data.sources.2.heldout_split and data.sources.2.split are the same: books"
    share = "data.sources.0.heldout_share=0.0 is not between 0 and 1, both excluded"
    wanted = [
        f"{share}\n  do:    data.sources.0.heldout_share=0.1",
        f"{same}\n  do:    data.sources.2.heldout_split=null",
    ]
    assert messages(settings) == wanted
    settings.heldout_path = str(files / "web.jsonl")
    assert list(mixture_errors(settings)) == []


@pytest.mark.parametrize(
    ("do", "wanted"),
    [
        ("data=text data.path=a file", "data.sources.3.name=null data.sources.3.path=a file"),
        ("or data=hub data.name=a folder", "or data.sources.3.path=null data.sources.3.name=a folder"),
        ("without one: data=python_stdlib", "without one: data.sources.3.name=null data.sources.3.python_stdlib=true"),
    ],
)
def test_advice_to_read_another_kind_of_text_is_for_the_source(do, wanted):
    error = name_source(DataError("cannot read it", where="data.split=x", do=do), 3)
    assert (error.where, error.do) == ("data.sources.3.split=x", wanted)


def test_a_source_without_a_place_or_with_two(files):
    settings = mixture(files)
    settings.sources[1].path = None
    settings.sources[0].name = "some/dataset"
    found = [str(error) for error in mixture_errors(settings)]
    assert found[0].startswith("data.sources.0 has path and name, and a source is one of them\n")
    assert found[0].endswith("do:    data.sources.0.name=null")
    assert found[1].startswith("data.sources.1 names no path and no dataset\n")


def with_stdlib(settings, **own):
    settings.sources.append(SourceConfig(python_stdlib=True, share=0.2, **own))
    return settings


def test_the_standard_library_is_a_source(files, tokenizer):
    settings = with_stdlib(mixture(files, (0.5, 0.3), heldout_tokens=2048))
    assert messages(settings) == []
    splits = [load_text(settings, tokenizer, split) for split in ("calibration", "heldout")]
    sources = [settings.sources[number].path for number in (0, 1)]
    alone = list_sources(settings)[2]
    assert (alone.name, alone.share, alone.data.kind) == ("the Python standard library", 0.2, "python_stdlib")
    for text, split in zip(splits, ("calibration", "heldout"), strict=True):
        own = {tuple(sequence.ids) for sequence in load_text(alone.data, tokenizer, split).sequences}
        tokens = sum(len(sequence.ids) for sequence in text.sequences if tuple(sequence.ids) in own)
        assert tokens == pytest.approx(0.2 * text.tokens, abs=2 * settings.max_length)
    settings.heldout_path = sources[1]
    assert list_sources(settings)[2].data.heldout_share == 0
    assert messages(settings) == []


def test_what_a_mixture_cannot_be(files):
    (error,) = messages(DataConfig(kind="mixture"))
    assert error.startswith("data.kind=mixture reads several sources, and none is named\n  do:    'data.sources=[{")
    (error,) = messages(mixture(files, labels="generated", max_new_tokens=8))
    assert error.startswith("data.labels=generated reads one source")
    settings = mixture(files)
    settings.sources[0].python_stdlib = True
    (error,) = (str(error) for error in mixture_errors(settings))
    assert error.endswith("do:    data.sources.0.python_stdlib=false")


@pytest.mark.parametrize("sizes", [[[5, 5, 5], [2] * 8], [[], [1]], [[50], [1] * 50, [7, 7]]])
def test_an_order_holds_every_sequence_once(sizes):
    order = interleave_shares(sizes, [1 / len(sizes)] * len(sizes))
    assert sorted(order) == [(source, number) for source, found in enumerate(sizes) for number in range(len(found))]
    for index, found in enumerate(sizes):
        assert [number for source, number in order if source == index] == list(range(len(found)))
