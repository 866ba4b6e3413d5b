from dataclasses import dataclass
from typing import Any

import pytest
import torch

from instruments.errors import ContractError
from stages.artifacts.tensor_file import load_layer_checkpoint, save_layer_checkpoint


@dataclass(frozen=True)
class Found:
    rows_ED: torch.Tensor
    nothing_N: torch.Tensor
    facts: dict[str, Any]


def test_a_layer_half_written_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr("instruments.files.sync", lambda _path: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        save_layer_checkpoint(tmp_path, 0, Found(torch.ones(1), torch.ones(1), {}))
    assert load_layer_checkpoint(tmp_path, 0, Found) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("byte", range(-8, 200, 13))
def test_a_damaged_layer_is_computed_again_and_said(tmp_path, caplog, byte):
    save_layer_checkpoint(tmp_path, 3, Found(torch.ones(1), torch.ones(1), {}))
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)
    assert load_layer_checkpoint(tmp_path, 3, Found) is None
    assert caplog.messages == [f"layer 3 of an unfinished run is damaged and will be computed again: {path}"]
    for value in (1, 2):  # the later one replaces the older
        save_layer_checkpoint(tmp_path, 3, Found(torch.full((1,), value), torch.ones(1), {}))
    assert load_layer_checkpoint(tmp_path, 3, Found).rows_ED.item() == 2


def test_a_whole_layer_of_another_kind_says_what_to_do(tmp_path):
    save_layer_checkpoint(tmp_path, 0, Found(torch.ones(1), torch.ones(1), {}))
    with pytest.raises(ContractError, match="run the stage that writes it again, with fresh=true"):
        load_layer_checkpoint(tmp_path, 0, int)
