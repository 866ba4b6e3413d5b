"""Parts of the parameter-level record: their place, and conditions for several workers."""

import pytest
from torch import nn

from instruments.errors import ConfigError, ContractError
from instruments.parameter_scan.file_format import WatchedParameter
from instruments.parameter_scan.writer import MscanWriter
from stages.accumulators.config import START_OVER
from stages.artifacts.job import Workers
from stages.scan.config import ScanConfig
from stages.scan.parameters import FILE, PartsPlace, publish_parameters, record_parameters

PARAMETERS = [WatchedParameter("model.layers.0.mlp.up_proj.weight", "linear", 6, 12, 4)]


def test_parts_of_another_scan_are_left_alone(tmp_path):
    """A scan after a change of code, text or precision keeps the parts of the earlier scan."""
    mine, other = (PartsPlace(tmp_path, {"code": code}) for code in ("c1", "c2"))
    MscanWriter(other.part(0), PARAMETERS, model="pico", block_width=4).close()
    assert not mine.parts()
    for worker in range(2):
        MscanWriter(mine.part(worker), PARAMETERS, model="pico", block_width=4).close()
    assert mine.parts() == [mine.part(0), mine.part(1)]
    (tmp_path / "out").mkdir()
    publish_parameters(mine, tmp_path / "out", 0)
    assert (tmp_path / "out" / FILE).is_file()


def test_sums_that_somebody_else_made_have_no_record_here(tmp_path):
    """Another job, on another machine, has flushed its sums to the same server."""
    with pytest.raises(ContractError):
        publish_parameters(PartsPlace(tmp_path, {"code": "c1"}), tmp_path, 3)


def test_only_a_scan_from_the_start_replaces_a_damaged_part(tmp_path):
    place = PartsPlace(tmp_path, {"code": "c1"})
    place.part(0).write_bytes(b"damaged")
    with pytest.raises(ContractError) as found:
        publish_parameters(place, tmp_path, 3)
    assert found.value.do == START_OVER


class Apart(Workers):
    """Two workers whose disks are not shared."""

    def gather(self, value):
        return [value, value.with_name("part of the other")]


def test_a_part_on_another_disk_stops_the_scan_before_it_begins(tmp_path):
    place, scan = PartsPlace(tmp_path, {"code": "c1"}), ScanConfig(parameters=True)
    model = nn.Sequential(nn.Linear(3, 5))
    recording = record_parameters(model, scan, place, Apart(0, 2), source="text", label="pico", fresh=False)
    with pytest.raises(ConfigError, match="on another disk"), recording:
        pass
