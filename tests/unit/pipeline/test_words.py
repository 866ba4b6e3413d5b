"""Models and texts by their paths, or by names on the hub."""

import pytest

from models.source import EMBEDDED
from pipeline.words import expand_words


@pytest.mark.parametrize(
    ("word", "expanded"),
    [
        ("model=/a b/My Qwen(1)", ["model=local", "model.path='/a b/My Qwen(1)'", "model.label=My_Qwen_1_"]),
        ("'model=/a'", ["'model=/a'"]),
        ("model='/a/b'", ["model=local", "model.path=/a/b", "model.label=b"]),
        ("model=Qwen/Qwen2.5-7B", ["model=hub", "model.name=Qwen/Qwen2.5-7B", "model.label=Qwen2.5-7B"]),
        ("data=allenai/c4", ["data=hub", "data.name=allenai/c4"]),
        ("data=/a/wiki.txt", ["data=text", "data.path=/a/wiki.txt"]),
        ("data=wiki.jsonl", ["data=text", "data.path=wiki.jsonl"]),
        *((word, [word]) for word in ("model=qwen3_1_7b", "model=qwen3.5", "model=a/b,c/d", "data=genral", "n=/a")),
    ],
)  # fmt: skip
def test_a_path_and_a_name_choose_their_option(word, expanded):
    assert expand_words([word]) == expanded


def test_a_folder_that_exists_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("models/mine", "texts"):
        (tmp_path / folder).mkdir(parents=True)
    assert expand_words(["model=models/mine"])[:2] == ["model=local", "model.path=models/mine"]
    assert expand_words(["data=texts"]) == ["data=text", "data.path=texts"]


def test_a_setting_that_is_typed_stays():
    typed = [f"model={EMBEDDED}", "model.label=mine"]
    assert expand_words(typed) == ["model=local", f"model.path={EMBEDDED}", "model.label=mine"]
