"""Dump an unchanged training script: one line, `import instruments.tensor_dump.auto`, and environment variables.

    TENSOR_SAVE_ENABLED=1 TENSOR_SAVE_DIR=dump CUSTOM_QUANT_TYPE=mxfp8 python train.py

The first model that runs with gradients is dumped until the process ends, also inside DistributedDataParallel or
Megatron's wrappers; a step ends with an optimizer step. TENSOR_SAVE_CONFIG='{"max_steps": 2}' holds settings of
DumpConfig. Without TENSOR_SAVE_ENABLED nothing happens.
"""

import atexit
import logging
import os
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from instruments.tensor_dump.config import ENABLED, FOLDER, read_settings
from instruments.tensor_dump.tensor_dump import TensorDump, find_modules

logger = logging.getLogger(__name__)


class AutoDump:
    """Waits for a model in training, and dumps it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Check every module call until a model in training runs. Raises ConfigError: invalid TENSOR_SAVE_CONFIG."""
        self.dump: TensorDump | None = None
        self._environment = {FOLDER: "tensor_logs", **environment}
        self._config = read_settings(environment)
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
            logger.warning("tensor dump: %s, every step, into %s", type(module).__name__, self.dump.folder)

    def _after_step(self, *_optimizer_and_arguments: object) -> None:
        """Hook after every optimizer; a second optimizer stepping for the same passes ends no step."""
        if self.dump is not None and self.dump.microbatches:
            self.dump.step()


running: AutoDump | None = None
if os.environ.get(ENABLED, "").strip():
    running = AutoDump(os.environ)
    atexit.register(running.close)
