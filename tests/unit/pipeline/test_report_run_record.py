"""The record of a run that programs read."""

import pytest

from instruments.errors import ContractError
from pipeline.report.run_record import RunRecord, StageRun, installed_versions, read_all_records, read_run_record


def test_what_is_written_is_read(tmp_path):
    record = RunRecord.start(["stage=scan"])
    record.stages += [StageRun("scan", "ab" * 32, 1.5, 7), StageRun("score", "cd" * 32)]
    record.write(tmp_path)
    assert read_run_record(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == ["stages.json"]


@pytest.mark.parametrize("content", [None, "no JSON", "[]", '{"stages": [{"stge": 1}]}'])
def test_a_folder_of_no_run_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "stages.json").write_text(content)
    with pytest.raises(ContractError) as error:
        read_run_record(tmp_path)
    assert error.value.what.startswith("no record of a run: ")
    assert error.value.where == str(tmp_path)
    assert error.value.do == "name a folder under outputs/runs, or latest"


def test_records_are_read_from_the_newest_to_the_oldest(tmp_path):
    """Jobs of a sweep by the time of the sweep and their number."""
    newest_first = ["runs/2026-03-04", "sweeps/2026-03-02/10", "sweeps/2026-03-02/9", "runs/2026-03-01"]
    for name in sorted(newest_first):
        (tmp_path / name).mkdir(parents=True)
        RunRecord.start([name]).write(tmp_path / name)
    (tmp_path / "sweeps/2026-03-02/notes").mkdir()
    assert [record.overrides for record in read_all_records(tmp_path)] == [[name] for name in newest_first]


def test_versions_are_those_installed():
    versions = installed_versions()
    assert versions["python"].startswith("3.")
    assert {"torch", "transformers", "numpy"} < set(versions)
