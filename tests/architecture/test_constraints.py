"""The pinned development environment can be installed by every Python that pyproject.toml names."""

import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PYTHONS = [line.rpartition(" ")[2] for line in PROJECT["classifiers"]]


def is_left_out(requirement, python):
    return requirement.marker is not None and not requirement.marker.evaluate({"python_version": python})


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_every_pin_has_a_wheel(python, tmp_path):
    """Needs the package index. antlr4 builds from source on all of them."""
    requirements = map(Requirement, chain(*PROJECT["optional-dependencies"].values()))
    left_out = {"antlr4-python3-runtime"} | {one.name for one in requirements if is_left_out(one, python)}
    pins = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line]
    (tmp_path / "pins.txt").write_text("\n".join(pin for pin in pins if pin.partition("==")[0] not in left_out))
    words = f"--dry-run --no-deps --only-binary=:all: --python-version {python} --target {tmp_path}/target -r"
    command = [sys.executable, "-m", "pip", "install", *words.split(), tmp_path / "pins.txt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_a_run_installs_no_tools_of_the_tests(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)

    def installed(target):
        done = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True)
        return re.findall(r"pip install .* -e '(.*)'", done.stdout)

    assert (installed("run"), installed("test")) == (["."], [".[dev]"])
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.runs").touch()
    assert (installed("run"), installed("test")) == ([], [".[dev]"])
    (tmp_path / ".venv/.installed").touch()
    assert (installed("run"), installed("test")) == ([], [])
