"""FP32 against low precision: where a model departs from its reference, and which module is the reason.

    diff = auto_diff(model, {"input_ids": ids}, precision="bfloat16")
    print(diff.first, diff.verdict)

Each module is judged twice: by what arrives at its output when everything runs in low precision (propagated), and by
its own error when it alone does, on the FP32 inputs. Both are measured against the model's own response, in FP32, to
one unit in the last place: an error is no fault where the model makes as much of a rounding.

Outputs wait on the host, those of FP32 only until the other runs have come by. Where `memory_mib` is too small for all
of them, the model runs again for the next part.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from instruments.errors import ConfigError
from instruments.precision.comparison import find_format
from instruments.precision.findings import Diff
from instruments.precision.passes import LowPass, PerturbedPass, ReferencePass, arguments_of, device_of, reference_of
from instruments.precision.session import AUTOCAST, LowPrecision, Perturbation, Session

PRECISIONS = ("bfloat16", "float16")
# Perturbed runs; one alone may meet the border between two discrete choices by luck, or miss it.
DRAWS = 3


@torch.no_grad()
def auto_diff(
    model: nn.Module,
    sample: Mapping[str, Any] | Sequence[Any] | Tensor,
    *,
    precision: str | torch.dtype = "bfloat16",
    mode: str = AUTOCAST,
    low: nn.Module | None = None,
    modules: Sequence[str] = ("*",),
    memory_mib: int = 2048,
    seed: int = 0,
) -> Diff:
    """Compare a model in low precision with itself in FP32.

    Args:
        model: any; it runs in evaluation mode and is left as it was. Of one in low precision an FP32 copy is made.
        sample: keyword arguments, or positional ones.
        precision: bfloat16 or float16.
        mode: autocast, or cast: `model.to(precision)`.
        low: with mode=cast, the model in low precision where it is made otherwise (`from_pretrained(dtype=...)`).
        modules: globs on the names of modules that are compared.
        memory_mib: of host memory for outputs that wait.
        seed: of the perturbation.
    Raises:
        ConfigError: a setting without meaning.
        NumericsError: the model does not run in this precision.
    """
    started = perf_counter()
    target = find_format(precision)
    if target.name not in PRECISIONS:
        raise ConfigError(f"precision={target.name} is no precision models run in", where="argument precision",
                          do="precision=bfloat16, or float16")  # fmt: skip
    wanted = _select(model, modules)
    with reference_of(model) as reference:
        device = device_of(reference, sample)
        args, kwargs = arguments_of(reference, sample, device)
        session = Session(
            reference, LowPrecision(reference, target, mode, low), Perturbation(target, seed), device, wanted,
            budget=memory_mib * 2**20,
        )  # fmt: skip
        diff = Diff(target.name, mode)
        while session.begin_window():
            LowPass(session, diff).run(args, kwargs)
            ReferencePass(session, diff).run(args, kwargs)
            for draw in range(DRAWS):
                PerturbedPass(session, draw).run(args, kwargs)
        diff.passes = session.windows * (2 + DRAWS)
        session.finish(diff)
    diff.seconds = perf_counter() - started
    return diff


def _select(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"no module is called {pattern}",
                where="setting modules",
                do=f"modules=['{names[len(names) // 2] or '*'}'], or ['*'] for all",
            )
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
