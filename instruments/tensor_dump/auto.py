"""Dump an unchanged training script, with settings from environment variables.

    TENSOR_SAVE_DIR=dump CUSTOM_QUANT_TYPE=mxfp8 python -m instruments.tensor_dump.auto train.py ARGUMENTS

The first model that runs with gradients is dumped until the process ends, also inside DistributedDataParallel or
Megatron's wrappers; a step ends with an optimizer step. TENSOR_SAVE_CONFIG='{"max_steps": 2}' holds settings of
DumpConfig, and TENSOR_SAVE_ENABLED=0 switches the dump off. A script that cannot be started in this way imports this
module; then only TENSOR_SAVE_ENABLED=1 switches the dump on.
"""

import argparse
import atexit
import logging
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from instruments.errors import ConfigError, exit_code
from instruments.tensor_dump.config import ENABLED, FOLDER, DumpConfig, read_control, read_settings
from instruments.tensor_dump.tensor_dump import TensorDump, find_modules

logger = logging.getLogger(__name__)


class AutoDump:
    """Waits for a model in training, and dumps it."""

    def __init__(self, config: DumpConfig, environment: Mapping[str, str]) -> None:
        """Check every module call until a model in training runs."""
        self.dump: TensorDump | None = None
        self._config, self._environment = config, environment
        self._waiting = register_module_forward_pre_hook(self._before)
        self._stepping = register_optimizer_step_post_hook(self._after_step)

    def close(self) -> None:
        """End the dump and remove all hooks."""
        self._waiting.remove()
        self._stepping.remove()
        if self.dump is None:
            logger.warning("tensor dump: no model ran with gradients, and nothing was dumped")
        else:
            self.dump.__exit__(None, None, None)

    def _before(self, module: nn.Module, _args: object) -> None:
        """Hook before every module; the model itself is called before its parts."""
        trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())
        if self.dump is None and trained and find_modules(module):
            self._waiting.remove()
            self.dump = TensorDump(module, config=self._config, environment=self._environment).__enter__()
            if module is self.dump.root:
                self.dump.begin_pass()  # the newly added hooks miss it
            if self.dump.enabled:  # on this rank
                logger.warning("tensor dump: %s, every step, into %s", type(module).__name__, self.dump.folder)

    def _after_step(self, *_optimizer_and_arguments: object) -> None:
        """Hook after every optimizer; a second optimizer stepping for the same passes ends no step."""
        if self.dump is not None and self.dump.microbatches:
            self.dump.step()


def start(script: Path | None = None) -> None:
    """Dump until the process ends, unless the environment switches it off.

    Raises ConfigError: an invalid variable, or there is no such script.
    """
    if script is not None and not script.exists():
        do = "python -m instruments.tensor_dump.auto train.py"
        raise ConfigError(f"there is no script {script}", where="command line", do=do)
    environment = {FOLDER: "tensor_logs", **os.environ}
    enabled, _folder, config = read_control(None, read_settings(environment), environment)
    if enabled:
        atexit.register(AutoDump(config, environment).close)


def main(words: Sequence[str] | None = None) -> int:
    """Run a script as `python SCRIPT ARGUMENTS` does, with a dump; its exit code and its exceptions are the script's.

    Returns 2 if the command line or the environment is wrong.
    """
    parser = argparse.ArgumentParser("python -m instruments.tensor_dump.auto", description="Dump a training script.")
    parser.add_argument("script", type=Path, help="the training script, or a folder with a __main__.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")
    wanted = parser.parse_args(words)
    if code := exit_code(lambda: start(wanted.script)):
        return code
    sys.argv = [str(wanted.script), *wanted.arguments]
    sys.path.insert(0, str(wanted.script.resolve().parent))
    runpy.run_path(str(wanted.script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.modules[__spec__.name] = sys.modules[__name__]  # a script that imports this module starts no second dump
    sys.exit(main())
elif os.environ.get(ENABLED, "").strip():
    start()
