"""Damage to published results is detected and named."""

import json

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
    with pytest.raises(ContractError, match="the result of scan is damaged") as caught:
        verify(folder, remedy=REMEDY)
    assert all(str(folder / name) in caught.value.where for name in "abc")
    assert caught.value.do == REMEDY


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"table": {"titel": ""}}'])
def test_a_damaged_manifest_is_a_contract_error(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ContractError, match="no readable manifest") as caught:
        verify(folder, remedy=REMEDY)
    assert caught.value.where == str(folder / "manifest.json")
    assert caught.value.do == REMEDY


def test_no_changed_byte_of_a_manifest_goes_unnoticed(folder):
    """Except changes after which the JSON value is the same."""
    whole = (folder / "manifest.json").read_bytes()
    for position, byte in enumerate(whole):
        changed = bytearray(whole)
        changed[position] = byte ^ 1
        (folder / "manifest.json").write_bytes(changed)
        try:
            same = json.loads(changed) == json.loads(whole)
        except ValueError:
            same = False
        if not same:
            with pytest.raises(ContractError):
                verify(folder, remedy=REMEDY)


def test_a_name_outside_the_folder_is_refused(folder):
    for name in ("/etc/passwd", "../a", "inner/../../a"):
        Manifest("f00d", {}, {name: {"size": 1, "sha256": ""}}, Table("", (), ())).write(folder)
        with pytest.raises(ContractError, match="names files outside its folder"):
            verify(folder, remedy=REMEDY)


def test_the_result_of_another_fingerprint_is_refused(folder):
    Manifest("beef", {}, {}, Table("", (), ())).write(folder)
    with pytest.raises(ContractError, match="the result of scan is damaged") as caught:
        verify(folder, remedy=REMEDY)
    assert caught.value.where == f"{folder} holds the result beef"
