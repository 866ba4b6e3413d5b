"""A second kind of device on any machine, for tests: `simulated:0` and `simulated:1` (see device.cpp).

Needs a C++ compiler, as `torch.utils.cpp_extension` does; the first use in a fresh cache compiles for a minute.
"""

import shutil
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension, generate_methods_for_privateuse1_backend, rename_privateuse1_backend

NAME = "simulated"
HERE = Path(__file__).parent
CODE = ("stages", "models", "instruments", "pipeline")


def missing() -> str | None:
    """Why the device cannot be built here; None where it can."""
    absent = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    return f"{' and '.join(absent)} not installed" if absent else None


@lru_cache(1)
def load_device() -> ModuleType:
    """Compile what is not compiled yet, and make the device known to torch. For the life of the process."""
    built = cpp_extension.load("simulated_device", [str(HERE / "device.cpp")], extra_cflags=["-O1"])
    module = ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.device_count = lambda: 2
    module.current_device, module.set_device = built.current_device, built.set_device
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: [built.default_generator(index).manual_seed(seed) for index in (0, 1)]
    module.manual_seed = lambda seed: built.default_generator(built.current_device()).manual_seed(seed)
    module.get_rng_state = lambda device=None: built.default_generator(_index(device)).get_state()
    module.set_rng_state = lambda state, device=None: built.default_generator(_index(device)).set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.synchronize = lambda device=None: None
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    generate_methods_for_privateuse1_backend()
    return built


def _index(device: object) -> int:
    index = device if isinstance(device, int) else torch.device(device or NAME).index
    return index or 0


@contextmanager
def counted_waits() -> Iterator[Counter[tuple[str, str]]]:
    """Counts what makes the host wait for the device: (operation, `file.py:line` of this project that asked for it)."""
    found: Counter[tuple[str, str]] = Counter()

    def listen(operation: str) -> None:
        own = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(HERE.parents[1])]
        own = [frame for frame in own if Path(frame.filename).relative_to(HERE.parents[1]).parts[0] in CODE]
        place = f"{Path(own[-1].filename).relative_to(HERE.parents[1])}:{own[-1].lineno}" if own else "elsewhere"
        found[operation, place] += 1

    device = load_device()
    device.listen(listen)
    try:
        yield found
    finally:
        device.listen(None)
