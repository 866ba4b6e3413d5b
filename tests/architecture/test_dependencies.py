"""Dependencies flow one way, and light modules stay light."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "sklearn", "umap", "numba", "matplotlib", "datasets")
LIGHT = [
    "pipeline.cli",
    "instruments.parameter_scan.command",
    "instruments.static_check.check",
    "models.source",
    "instruments.parameter_scan.reader",
    "instruments.safetensors_files",
    "models.decoder",
    "models.targets.base",
    "stages.text.sources",
    "stages.text.check",
    *(".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in REPOSITORY.glob("stages/*/config.py")),
]


def test_layers_and_independence_hold():
    """The contracts of pyproject.toml, checked by import-linter."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_light_modules_load_nothing_heavy():
    """Modules that run before the settings are checked import none of HEAVY."""
    code = f"import sys, {', '.join(LIGHT)}; print(sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["pipeline", "stages", "models", "instruments"])
def test_init_files_hold_a_docstring_only(package):
    names_of_its_parts = REPOSITORY / "instruments/precision/__init__.py"  # it only re-exports names
    for path in set((REPOSITORY / package).rglob("__init__.py")) - {names_of_its_parts}:
        assert len(path.read_text().strip().splitlines()) == 1, path
        assert path.read_text().startswith('"""'), path


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
