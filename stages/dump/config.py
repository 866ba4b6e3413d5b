"""Settings of the dump."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from instruments.errors import ConfigError
from instruments.tensor_dump.config import QUANT_TYPES, DumpConfig, TensorSelection, read_control
from models.config import setting_word

VERSION = 1


@dataclass
class DumpStageConfig(TensorSelection):
    """Selection of tensors, and amount of text; explained in conf/dump."""

    steps: int = field(default=1, metadata={"minimum": 1})
    batch_tokens: int = field(default=1024, metadata={"minimum": 1})
    gradients: bool = True
    gradient_checkpointing: bool = field(default=False, metadata={"needs": {"gradients": True}})
    enabled: bool = field(default=True, metadata={"fingerprint": False})
    folder: str | None = field(default=None, metadata={"fingerprint": False})

    def contradictions(self) -> Iterator[ConfigError]:
        """Errors: settings of the dump exclude each other, or leave nothing to dump."""
        try:  # the setting takes precedence over CUSTOM_QUANT_TYPE; `field_errors` checks its value
            read_control(Path(), DumpConfig(quant_type=self.quant_type and QUANT_TYPES[0]), os.environ)
        except ConfigError as error:
            yield error
        if not self.enabled:
            what, where = "the dump is switched off", "setting dump.enabled, environment variable TENSOR_SAVE_ENABLED"
            yield ConfigError(what, where=where, do="dump.enabled=true")
        if self.folder is not None and Path(self.folder).exists() and not Path(self.folder).is_symlink():
            what = f"dump.folder={self.folder} exists already and is not a link, so this run cannot replace it"
            where = "setting dump.folder, environment variable TENSOR_SAVE_DIR"
            yield ConfigError(what, where=where, do=setting_word("dump.folder", f"{self.folder}-2"))
        if not self.gradients and all(tensor.startswith("grad_") for tensor in self.tensors):
            what = "dump.gradients=false computes no gradients, and dump.tensors has nothing else"
            do = "dump.gradients=true, or dump.tensors=[input,weight]"
            yield ConfigError(what, where="settings dump.gradients and dump.tensors", do=do)
