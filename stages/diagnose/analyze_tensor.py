"""check=analyze_tensor: what tensors of a file, or activations of the model, would lose in low precision."""

import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - only the error
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from instruments.errors import ConfigError, DataError, UserError
from instruments.precision.calls import Call, ModuleEvents, find_tensors, trace_modules
from instruments.precision.plot import draw_tensor
from instruments.precision.tensor_analysis import COLUMNS, analyze_tensor, notes_of, rows_of, to_json
from instruments.safetensors_header import read_header
from stages.artifacts.job import Table
from stages.diagnose.subject import Request, load_model, load_sample


class _Outputs(ModuleEvents):
    """Tensors from the modules that are asked for, in the order of execution."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = patterns
        self.found: dict[str, Tensor] = {}

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
    """The tensors of a .safetensors or .pt file whose names fit a glob.

    Raises:
        DataError: it cannot be read, or holds no such tensor.
    """
    found = _read(path)
    chosen = {name: one for name, one in found.items() if any(fnmatchcase(name, glob) for glob in patterns)}
    if not chosen:
        raise DataError(
            f"none of {len(found)} tensors is called {', '.join(patterns)}",
            where=str(path),
            do=f"diagnose.analyze_tensor.tensors=['{next(iter(found), '*')}']",
        )
    return chosen


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            read_header(path)
            return dict(load_file(path))
        # Tensors and plain containers, nothing that runs code.
        held = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
        return dict(_flatten(held, ""))
    except UserError:
        raise
    except UnpicklingError as error:
        # torch's own text goes on to advise weights_only=False, which would run what the file says.
        raise _unreadable(path, "it holds more than tensors, and opening that can run any code") from error
    except Exception as error:  # torch's reader fails at a foreign file in many ways
        raise _unreadable(path, str(error).strip().partition("\n")[0][:200] or type(error).__name__) from error


def _unreadable(path: Path, reason: str) -> DataError:
    do = "give a .safetensors file, or a .pt file of tensors alone"
    return DataError(f"no tensors can be read: {reason}", where=str(path), do=do)


def _flatten(held: Any, name: str) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401 - whatever the file holds
    if isinstance(held, Tensor):
        yield name or "tensor", held
    elif isinstance(held, Mapping | list | tuple):
        for key, item in held.items() if isinstance(held, Mapping) else enumerate(held):
            yield from _flatten(item, f"{name}.{key}".lstrip("."))


_MOST_PICTURES = 12


def analyze_tensors(request: Request) -> Table:
    """Write `analyze_tensor.json` and pictures of the first tensors."""
    asked = request.settings.analyze_tensor
    tensors = read_tensors(Path(asked.file), asked.tensors) if asked.file else read_activations(request, asked.modules)
    found, notes = [], []
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            found.append(analyze_tensor(tensor, asked.formats, name=name))
        else:
            notes.append(f"{name} holds {str(tensor.dtype).removeprefix('torch.')}: not analysed")
    (request.job.out / "analyze_tensor.json").write_text(json.dumps(to_json(found), indent=1) + "\n")
    for number, one in enumerate(found[:_MOST_PICTURES]):
        draw_tensor(one, request.job.out / f"tensor_{number:02}.png")
    if len(found) > _MOST_PICTURES:
        notes.append(f"pictures of the first {_MOST_PICTURES} of {len(found)} tensors")
    return Table("What tensors lose in low precision", COLUMNS, rows_of(found), [*notes_of(found), *notes])
