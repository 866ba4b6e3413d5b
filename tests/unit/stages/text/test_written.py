import pytest

from instruments.errors import ContractError
from stages.text.written import WrittenFile

FACTS = {"prompts": "f00", "ends": [3], "temperature": 0.1}
BATCHES = [{0: [5, 6, 3], 1: [7]}, {2: [8, 9]}, {3: [3], 4: [10, 11]}]


@pytest.fixture
def path(tmp_path):
    """A file of three batches, in a folder made for it."""
    path = tmp_path / "scratch" / "written.jsonl"
    file = WrittenFile(path, FACTS)
    assert file.read() == {}
    for batch in BATCHES:
        file.add(batch)
    return path


def test_what_is_added_is_read(path):
    assert WrittenFile(path, FACTS).read() == BATCHES[0] | BATCHES[1] | BATCHES[2]


def test_a_file_cut_anywhere_holds_whole_batches_and_goes_on(path):
    """As a kill at any moment leaves it."""
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        whole = max(0, content[:length].count(b"\n") - 1)
        file = WrittenFile(path, FACTS)
        assert file.read() == {number: ids for batch in BATCHES[:whole] for number, ids in batch.items()}
        for batch in BATCHES[whole:]:
            file.add(batch)
        assert path.read_bytes() == content


def test_other_text_or_settings(path):
    with pytest.raises(ContractError) as caught:
        WrittenFile(path, FACTS | {"temperature": 0.2, "prompts": "f01"}).read()
    assert str(caught.value) == (
        "the file of what the model has written belongs to other text or settings\n"
        f"  where: {path}; prompts: f00 there, f01 here, temperature: 0.1 there, 0.2 here\n"
        f"  do:    rm {path}   (the model then writes it again)"
    )


@pytest.mark.parametrize("damage", [b"{]\n", b"[]\n", b"\xff\n"])
def test_damage(path, damage):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage, *lines[3:]]))
    with pytest.raises(ContractError) as caught:
        WrittenFile(path, FACTS).read()
    assert str(caught.value) == (
        "the file of what the model has written is damaged\n"
        f"  where: {path}:3\n"
        f"  do:    rm {path}   (the model then writes it again)"
    )
