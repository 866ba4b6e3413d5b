"""Every emitted checkpoint read by transformers 4.57, from packages of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numerics.emission_cases import CASES, TOLERANCE, reload_all, write_case

from models.targets.config import MOE_TARGETS

pytestmark = pytest.mark.slow
PACKAGES = (
    "transformers==4.57.6", "huggingface-hub>=0.34,<1", "tokenizers>=0.22,<=0.23",
    # Of that hub; ours asks in another way.
    "requests", "urllib3", "charset-normalizer", "idna", "certifi",
)  # fmt: skip


@pytest.fixture(scope="module")
def transformers4(pytestconfig: pytest.Config) -> Path:
    """A folder with transformers 4.57 and the packages it wants older than ours, or besides; kept in pytest's cache."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("transformers-4.57.6")
    complete = folder / "complete"
    if complete.exists() and complete.read_text() == repr(PACKAGES):
        return folder
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", folder]
    done = subprocess.run([*command, *PACKAGES], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"transformers 4.57 cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    complete.write_text(repr(PACKAGES))
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, transformers4: Path) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("emission")
    for name, case in CASES.items():
        write_case(folder / name, case)
    return reload_all(folder, path=transformers4)


@pytest.mark.parametrize("name", CASES)
def test_all_experts_on_equals_dense(report: dict[str, dict[str, Any]], name: str) -> None:
    found, case = report[name], CASES[name]
    assert found["transformers"] == "4.57.6"
    assert found["architecture"] == MOE_TARGETS[case.target].architecture
    assert found["difference"] <= TOLERANCE * max(1.0, found["scale"])
    assert found["saved_again"] == 0.0
    assert found["loading"] == {}, "missing or unexpected keys"
    assert found["generated"] == 4
    assert found["own_dtype"] == str(case.dtype)
