"""Parts of the parameter-level record: their place, and conditions for several workers."""

import pytest
import torch

from instruments.errors import ContractError
from instruments.parameter_scan.file_format import ScannedSequence, WatchedParameter
from instruments.parameter_scan.targets import ScanRecord
from instruments.parameter_scan.writer import MscanWriter
from stages.scan.parameters import FILE, PartsPlace, publish_parameters, require_recorded

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


@pytest.mark.parametrize("worker", [None, 0])
def test_sums_that_somebody_else_made_have_no_record_here(tmp_path, worker):
    """Another job, on another machine, has flushed its sums to the same server."""
    place = PartsPlace(tmp_path, {"code": "c1"})
    if worker is not None:
        with MscanWriter(place.part(worker), PARAMETERS, model="pico", block_width=4) as writer:
            blocks = torch.ones(2, 1), torch.ones(2, 1), torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 3)
            writer.add(ScanRecord([ScannedSequence("a", 5), ScannedSequence("b", 7)], *blocks), [3, 5])
    require_recorded(place, [] if worker is None else [3, 5])
    missing = 3 if worker is None else 1
    with pytest.raises(ContractError) as caught:
        require_recorded(place, [3, 4, 5])
    assert caught.value.what.startswith(f"the sums hold {missing} of 3 samples whose parameter-level record is on")
