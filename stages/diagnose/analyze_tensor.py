"""check=analyze_tensor: rounding error of a file's tensors, or of a model's activations, in low precision."""

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from instruments.errors import ConfigError, DataError
from instruments.precision import tensor_file
from instruments.precision.calls import Call, ModuleEvents, find_tensors, trace_modules
from instruments.precision.plot import draw_tensor
from instruments.precision.tensor_analysis import COLUMNS, analyze_tensor, notes_of, rows_of, to_json
from instruments.precision.tensor_file import flatten_tensors
from stages.artifacts.job import Table
from stages.diagnose.subject import Request, load_model, load_sample


class _Outputs(ModuleEvents):
    """Collects the outputs of the selected modules, in the order of execution."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = patterns
        self.found: dict[str, Tensor] = {}

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
        """Copy the output tensors to the CPU; the model may change them later."""
        if any(fnmatchcase(call.module, pattern) for pattern in self.patterns):
            kept = {f"{call}{path}": tensor for path, tensor in find_tensors(output).items()}
            self.found |= {name: tensor.to("cpu", copy=True) for name, tensor in kept.items()}


@torch.no_grad()
def read_activations(request: Request, patterns: Sequence[str]) -> dict[str, Tensor]:
    """FP32 outputs of the modules whose names match a glob. Raises ConfigError: no module matches."""
    model = load_model(request, torch.float32)
    outputs = _Outputs(patterns)
    with trace_modules(model, outputs):
        model(**load_sample(request, model), use_cache=False)
    if not outputs.found:
        names = [name for name, _ in model.named_modules() if name]
        raise ConfigError(
            f"no module that ran is called {', '.join(patterns)}",
            where="setting diagnose.analyze_tensor.modules",
            do=f"diagnose.analyze_tensor.modules=['{names[-1]}']",
        )
    return outputs.found


def read_tensors(path: Path, patterns: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of a .safetensors or .pt file whose names match a glob.

    Raises:
        DataError: the file cannot be read, or no tensor matches.
    """
    found = dict(flatten_tensors(tensor_file.read_tensors(path)))
    chosen = {name: one for name, one in found.items() if any(fnmatchcase(name, glob) for glob in patterns)}
    if not chosen:
        raise DataError(
            f"none of {len(found)} tensors is called {', '.join(patterns)}",
            where=str(path),
            do=f"diagnose.analyze_tensor.tensors=['{next(iter(found), '*')}']",
        )
    return chosen


_MOST_PICTURES = 12


def analyze_tensors(request: Request) -> Table:
    """Write `analyze_tensor.json` and pictures of the first tensors."""
    asked = request.settings.analyze_tensor
    tensors = read_tensors(Path(asked.file), asked.tensors) if asked.file else read_activations(request, asked.modules)
    found, notes = [], []
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            scale = None if asked.scale == "none" else asked.scale
            found.append(analyze_tensor(tensor, asked.formats, scale=scale, name=name))
        else:
            notes.append(f"{name} holds {str(tensor.dtype).removeprefix('torch.')}: not analysed")
    (request.job.out / "analyze_tensor.json").write_text(json.dumps(to_json(found), indent=1) + "\n")
    for number, one in enumerate(found[:_MOST_PICTURES]):
        draw_tensor(one, request.job.out / f"tensor_{number:02}.png")
    if len(found) > _MOST_PICTURES:
        notes.append(f"pictures of the first {_MOST_PICTURES} of {len(found)} tensors")
    return Table("What tensors lose in low precision", COLUMNS, rows_of(found), [*notes_of(found), *notes])
