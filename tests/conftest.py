"""Settings of all tests: one CPU thread, shapes of tensors checked, no downloads."""

import gc
import os
from copy import deepcopy
from pathlib import Path
from tempfile import gettempdir

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Descriptions of dense models are kept for all processes of the tests, apart from the user's.
os.environ.setdefault("XDG_CACHE_HOME", str(Path(gettempdir()) / f"tiny-onn-tests-{os.getuid()}"))

import pytest
import shape_checking
from hydra._internal.config_repository import ConfigRepository

shape_checking.install(["models", "stages"])

# A file under conf/ is read once, not for each of the two thousand compositions of the tests.
_load_config, _loaded = ConfigRepository.load_config, {}


def _load_once(self: ConfigRepository, config_path: str) -> object:
    key = config_path, *(source.path for source in self.sources)
    if key not in _loaded:
        _loaded[key] = _load_config(self, config_path)
    return deepcopy(_loaded[key])


ConfigRepository.load_config = _load_once


@pytest.fixture(autouse=True)
def _checked_calls():
    """Every test checks the first calls of a function."""
    shape_checking.calls.clear()


@pytest.fixture(autouse=True, scope="module")
def _frozen_imports():
    """Every stage starts with a garbage collection; frozen imports are not searched each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def closed(tmp_path):
    """A folder that this process may not enter; root gives up its rights during the test."""
    folder, user = tmp_path / "closed", os.geteuid()
    folder.mkdir(mode=0)
    if user == 0:
        os.seteuid(65534)
    yield folder
    os.seteuid(user)
    folder.chmod(0o700)
