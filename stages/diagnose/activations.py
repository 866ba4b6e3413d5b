"""What modules of the model give on the sample."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from models.errors import ConfigError
from models.numerics.diff.calls import Arguments, Call, listen
from models.numerics.nested import find_tensors
from stages.diagnose.request import Request
from stages.diagnose.subject import load_model, load_sample


class _Outputs:
    """Tensors from the modules that are asked for, in the order of execution."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = patterns
        self.found: dict[str, Tensor] = {}

    def before(self, call: Call, module: nn.Module, arguments: Arguments) -> None:
        """Nothing is there yet."""

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - whatever it returns
        """Keep them, as they are now."""
        if any(fnmatchcase(call.module, pattern) for pattern in self.patterns):
            kept = {f"{call}{path}": tensor for path, tensor in find_tensors(output).items()}
            self.found |= {name: tensor.to("cpu", copy=True) for name, tensor in kept.items()}


@torch.no_grad()
def read_activations(request: Request, patterns: Sequence[str]) -> dict[str, Tensor]:
    """Outputs in FP32 of the modules whose names fit a glob. Raises ConfigError: there is none."""
    model = load_model(request, torch.float32)
    outputs = _Outputs(patterns)
    with listen(model, outputs):
        model(**load_sample(request, model), use_cache=False)
    if not outputs.found:
        names = [name for name, _ in model.named_modules() if name]
        raise ConfigError(
            f"no module that ran is called {', '.join(patterns)}",
            where="setting diagnose.analyze_tensor.modules",
            do=f"diagnose.analyze_tensor.modules=['{names[-1]}']",
        )
    return outputs.found
