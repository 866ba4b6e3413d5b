"""`make check-gpu`: reports that there is no GPU, and fills its table with any device."""

import pytest
from benchmarks import check_gpu


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_it_says_so_and_does_nothing(capsys, monkeypatch):
    monkeypatch.setattr(check_gpu, "run_tests", lambda: pytest.fail("tests ran"))
    assert check_gpu.main([]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("there is no GPU here: torch ")
    assert "finds no device cuda\n  where: make check-gpu\n  do:    a machine with a CUDA device" in said.err


@pytest.mark.parametrize(("met", "code"), [("yes", 0), ("no", 1)])
def test_the_exit_code_says_whether_everything_is_as_it_should_be(met, code, capsys, monkeypatch):
    monkeypatch.setattr(check_gpu, "run_tests", lambda: iter([("tests marked gpu", "7 passed", "all pass", "yes")]))
    monkeypatch.setattr(check_gpu, "compare_chains", lambda *_: iter([("loss of dense", "3.1", "3.2", met)]))
    assert check_gpu.main(["--device", "cpu", "--groups"]) == code
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines() if "|" in line
    ]
    assert rows[0] == ["what", "GPU", "CPU, or target", "as it should be"]
    assert rows[2:] == [["tests marked gpu", "7 passed", "all pass", "yes"], ["loss of dense", "3.1", "3.2", met]]


@pytest.mark.slow
def test_the_same_device_twice_finds_the_same():
    rows = {cells[0]: cells[1:] for cells in check_gpu.compare_chains("cpu", ["debug=tiny"])}
    losses = {name: cells for name, cells in rows.items() if name.startswith("held-out loss")}
    assert {"held-out loss of dense", "held-out loss of carved"} <= losses.keys()
    assert all(cells[0] == cells[1] and cells[2] == "yes" for cells in losses.values())
    assert {"scan, embedded model", "evaluate, embedded model"} <= rows.keys()
