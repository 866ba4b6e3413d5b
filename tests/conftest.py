"""Settings of all tests: one CPU thread, shapes of tensors checked, no downloads."""

import gc
import os
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from threading import RLock

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Descriptions of dense models are kept for all processes of the tests, apart from the user's.
os.environ.setdefault("XDG_CACHE_HOME", str(Path(gettempdir()) / f"tiny-onn-tests-{os.getuid()}"))

import pytest
import shape_checking
from hydra._internal import config_loader_impl as hydra_loader
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import Overrides
from tqdm import tqdm

from instruments import cpu, device

shape_checking.install(["models", "stages"])
cpu.FACTS = Path(os.devnull)  # a test's own products are fp32, on any CPU
tqdm.set_lock(RLock())  # its own is shared with forked children, and one that is killed may hold it

# A file under conf/ is read once, and options of the same groups are put together once, not in each of the two thousand
# compositions of the tests; what is set by name comes on top of them, as in Hydra.
_load_config, _list_defaults = ConfigRepository.load_config, hydra_loader.create_defaults_list
_merge_defaults = ConfigLoaderImpl._compose_config_from_defaults_list
_loaded, _lists, _merged = {}, {}, {}


def _load_once(repo, config_path):
    key = config_path, *_paths(repo)
    if key not in _loaded:
        _loaded[key] = _load_config(repo, config_path)
    return deepcopy(_loaded[key])


def _list_once(repo, config_name, overrides_list, prepend_hydra, skip_missing):
    groups = [override for override in overrides_list if repo.group_exists(override.key_or_group)]
    key = config_name, skip_missing, *_paths(repo), *(override.input_line for override in groups)
    if key not in _lists:
        _lists[key] = _list_defaults(repo, config_name, groups, prepend_hydra, skip_missing)
    return replace(_lists[key], config_overrides=Overrides(repo, overrides_list).config_overrides)


def _merge_once(loader, defaults, repo):
    key = *_paths(repo), *map(repr, defaults)
    if key not in _merged:
        _merged[key] = _merge_defaults(loader, defaults, repo)
    return deepcopy(_merged[key])


def _paths(repo):
    return (source.path for source in repo.get_sources())


ConfigRepository.load_config, hydra_loader.create_defaults_list = _load_once, _list_once
ConfigLoaderImpl._compose_config_from_defaults_list = _merge_once


@pytest.fixture
def amx(monkeypatch):
    """A CPU with AMX, if this one has it, whose products are then rounded."""
    monkeypatch.setattr(cpu, "FACTS", Path("/proc/cpuinfo"))
    for cached in (cpu.has_amx, device._formats):
        cached.cache_clear()
    yield cpu.has_amx()
    for cached in (cpu.has_amx, device._formats):
        cached.cache_clear()


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
