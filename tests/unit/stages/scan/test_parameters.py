"""Where the parts of the parameter-level record lie, and who may write them."""

from dataclasses import dataclass, field

import pytest

from models.capture.records import WatchedParameter
from models.errors import ConfigError, ContractError
from models.mscan.writer import MscanWriter
from stages.contracts.workers import ALONE, Workers
from stages.scan.parameters import FILE, PartsPlace, publish_parameters, require_common_folder

PARAMETERS = [WatchedParameter("model.layers.0.mlp.up_proj.weight", "linear", 6, 12, 4)]


@dataclass(frozen=True)
class Team(Workers):
    """The leading worker of three, whose like answer `others`."""

    world: int = 3
    others: list = field(default_factory=list)

    def share(self, value):
        return [value, *(self.others if isinstance(value, bool) else [None, None])]


def test_workers_with_one_folder_go_on(tmp_path):
    require_common_folder(tmp_path, ALONE)
    require_common_folder(tmp_path, Team(others=[True, True]))
    assert not list(tmp_path.iterdir())


def test_workers_on_machines_without_a_common_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        require_common_folder(tmp_path, Team(others=[True, False]))
    assert str(caught.value) == (
        "scan.parameters=true joins the files of all workers, and worker 2 has another output folder than worker 0\n"
        f"  where: setting output_dir, {tmp_path}\n"
        "  do:    output_dir= on a disk that all machines share, or scan=default"
    )
    assert not list(tmp_path.iterdir())


def test_parts_of_another_scan_are_left_alone(tmp_path):
    """Code, text or precision may change while a shared store is given another namespace."""
    mine, other = (PartsPlace(tmp_path, {"code": code}) for code in ("c1", "c2"))
    MscanWriter(other.part(0), PARAMETERS, model="pico", block_width=4).close()
    with pytest.raises(ContractError, match="its parameter-level record lies with whoever scanned"):
        publish_parameters(mine, tmp_path / "out", 0, "f32")
    for worker in range(2):
        MscanWriter(mine.part(worker), PARAMETERS, model="pico", block_width=4).close()
    (tmp_path / "out").mkdir()
    publish_parameters(mine, tmp_path / "out", 0, "f32")
    assert (tmp_path / "out" / FILE).is_file()
