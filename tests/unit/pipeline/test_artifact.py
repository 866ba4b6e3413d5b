"""Damage to published results is found and named."""

import pytest

from instruments.errors import ContractError
from pipeline.artifacts import Manifest, describe_files, verify
from stages.artifacts.job import Table

REMEDY = "python -m pipeline stage=scan fresh=true"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "scan" / "f00d"
    folder.mkdir(parents=True)
    for name in ("a", "b", "c"):
        (folder / name).write_text(name * 3)
    Manifest("f00d", {}, describe_files(folder), Table("", (), ())).write(folder)
    return folder


def test_every_damaged_file_is_named(folder):
    (folder / "a").unlink()
    (folder / "b").write_text("bbbb")
    (folder / "c").write_text("ccd")
    with pytest.raises(ContractError) as caught:
        verify(folder, remedy=REMEDY)
    assert str(caught.value) == (
        "the result of scan is damaged\n"
        f"  where: {folder}/a is missing; {folder}/b has 4 bytes; 3 were published; "
        f"{folder}/c was changed after it was published\n"
        "  do:    python -m pipeline stage=scan fresh=true"
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"table": {"titel": ""}}'])
def test_a_damaged_manifest_is_a_contract_error(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ContractError, match="no readable manifest") as caught:
        verify(folder, remedy=REMEDY)
    assert caught.value.where == str(folder / "manifest.json")
    assert caught.value.do == REMEDY
