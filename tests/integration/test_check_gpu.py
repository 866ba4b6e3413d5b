"""`make check-gpu`: reports that there is no GPU, and fills its table with any device."""

import pytest
from benchmarks import check_gpu


def test_without_a_gpu_it_says_so_and_does_nothing(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(check_gpu, "run_tests", lambda: pytest.fail("tests ran"))
    assert check_gpu.main([]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("there is no GPU here: torch ")
    assert "finds no device cuda\n  where: make check-gpu\n  do:    a machine with a CUDA device" in said.err


@pytest.mark.parametrize(("met", "code"), [("yes", 0), ("no", 1)])
def test_the_exit_code_says_whether_everything_is_as_it_should_be(met, code, capsys, monkeypatch):
    monkeypatch.setattr(check_gpu, "run_tests", lambda: iter([("tests marked gpu", "7 passed", "all pass", "yes")]))
    monkeypatch.setattr(check_gpu, "run_chain", lambda *_: iter([("gap of carved", "0.03", "0.02", met)]))
    assert check_gpu.main(["--device", "cpu", "--parts", "tests", "chain"]) == code
    assert rows_of(capsys)[2:] == [
        ["tests marked gpu", "7 passed", "all pass", "yes"],
        ["gap of carved", "0.03", "0.02", met],
    ]


def test_the_machine_is_measured_on_any_device(capsys):
    assert check_gpu.main(["--device", "cpu", "--parts", "machine"]) == 0
    said = {cells[0]: cells[1] for cells in rows_of(capsys)}
    assert {"load average", "an operator, of the host", "products in bf16", "products in TF32"} <= said.keys()
    assert float(said["an operator, of the host"].split()[0]) > 0


def rows_of(capsys):
    return [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines() if "|" in line
    ]


@pytest.mark.slow
def test_the_chain_on_a_cpu_has_the_recorded_losses():
    rows = {cells[0]: cells[1:] for cells in check_gpu.run_chain("cpu", ["model.rounded_products=false"])}
    gaps = {name: cells for name, cells in rows.items() if name.startswith("gap of")}
    assert {"gap of carved, embedded model", "gap of static_mask, embedded model"} <= gaps.keys()
    assert all(cells[2] == "yes" for cells in gaps.values())
    assert {"scan, embedded model", "evaluate, embedded model"} <= rows.keys()
