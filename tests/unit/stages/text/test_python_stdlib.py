import sys

from stages.text.python_stdlib import choose_modules, list_modules, read_module, read_stdlib, split_docstrings

SOURCE = '''\
"""What the module does."""

import os

SIZE = 3


class Lobster:
    """A crustacean."""

    def pinch(self, hand, *, hard=False):
        """Pinch a hand.

        It hurts.
        """
        return hand


async def swim() -> None:
    pass
'''


def test_docstrings_and_source_are_told_apart():
    docstrings, source = split_docstrings(SOURCE, "sea.lobster")
    assert docstrings == (
        "sea.lobster\n\nWhat the module does.\n\n"
        "class Lobster\n\nA crustacean.\n\n"
        "pinch(self, hand, *, hard=False)\n\nPinch a hand.\n\nIt hurts.\n\n"
    )
    assert source == (
        "\nimport os\n\nSIZE = 3\n\n\nclass Lobster:\n\n"
        "    def pinch(self, hand, *, hard=False):\n        return hand\n\n\n"
        "async def swim() -> None:\n    pass\n"
    )


def test_form_feeds_between_definitions_lose_no_line():
    source = 'import os\n\x0c\ndef swim():\n    """Swim."""\n    return 1\n'
    assert split_docstrings(source, "sea") == ("swim()\n\nSwim.\n\n", "import os\n\x0c\ndef swim():\n    return 1\n")


def test_a_module_gives_docstrings_and_source_in_turn(tmp_path):
    path = tmp_path / "lobster.py"
    path.write_bytes(b"# coding: latin-1\n" + SOURCE.replace("hurts", "hürts").encode("latin-1"))
    first, second = read_module("sea.lobster", path, docstrings_first=True)
    assert (first.name, second.name) == ("sea.lobster docstrings 1", "sea.lobster source 1")
    assert "It hürts." in first.text
    assert "return hand" in second.text
    assert list(read_module("sea.lobster", path, docstrings_first=False)) == [second, first]


def test_reads_modules_but_no_tests_and_no_tables():
    names = list_modules().keys()
    assert {"json", "json.decoder", "asyncio.tasks", "argparse"} <= names
    tops = {name.partition(".")[0] for name in names}
    assert tops <= sys.stdlib_module_names
    assert not tops & {"encodings", "idlelib", "lib2to3", "test", "turtledemo"}
    assert not any({"test", "tests"} & set(name.split(".")) for name in names)
    assert len(names) > 300


def test_no_module_is_in_both_splits():
    names = list_modules().keys()
    heldout, calibration = (choose_modules(names, 0.1, split) for split in ("heldout", "calibration"))
    assert sorted(heldout + calibration) == sorted(names)
    assert 20 < len(heldout) < 80
    assert {document.name.partition(" ")[0] for document in read_stdlib(0.1, "heldout")} == {*heldout}
