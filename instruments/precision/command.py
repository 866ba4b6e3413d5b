"""`python -m pipeline auto_diff`: FP32 against low precision, for any module and a sample of its input."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from runpy import run_path
from typing import TYPE_CHECKING, Any

from instruments.errors import ConfigError, check_output, exit_code, say
from instruments.files import write_json

if TYPE_CHECKING:
    from torch import nn

_EPILOG = """
FILE.py is your own code and is run: name only a file that you trust. The sample is read without running code: tensors,
numbers and text in lists and dicts, saved by torch.save or safetensors; a pickle of anything else is refused.
A dict holds keyword arguments, a list or tuple positional ones.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: ok; 1: a warning, a severe verdict, or an unreadable sample; 2: wrong command line; 130: interrupted.
    """
    about = "FP32 against low precision, module by module, for a model of your own."
    parser = argparse.ArgumentParser(prog="python -m pipeline auto_diff", description=about, epilog=_EPILOG)
    parser.add_argument(
        "--model",
        required=True,
        metavar="FILE.py:NAME",
        help="a module, or a class or function that makes one",
    )
    parser.add_argument("--input", required=True, type=Path, metavar="SAMPLE", help=".pt or .safetensors, tensors only")
    parser.add_argument("--precision", default="bf16", help="bf16 or fp16 (default: bf16)")
    parser.add_argument("--mode", default="autocast", help="autocast, or cast: model.to(precision) (default: autocast)")
    parser.add_argument("--modules", nargs="+", default=["*"], metavar="GLOB", help="modules to compare (default: all)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write all figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="also draw the errors, as PNG")
    wanted = parser.parse_args(words)
    return exit_code(lambda: _run(wanted))


def _run(wanted: argparse.Namespace) -> int:
    check_output(wanted.json, wanted.plot)
    if not wanted.input.is_file():
        raise ConfigError(f"there is no file {wanted.input}", where="--input", do="torch.save(sample, 'sample.pt')")
    model = find_model(wanted.model)
    # A wrong command line needs no torch.
    from instruments.precision.findings import draw_diff, to_json  # noqa: PLC0415
    from instruments.precision.model_diff import auto_diff  # noqa: PLC0415
    from instruments.precision.verdict import Verdict  # noqa: PLC0415
    from instruments.safetensors_files import read_tensors  # noqa: PLC0415

    sample = read_tensors(wanted.input)
    diff = auto_diff(model, sample, precision=wanted.precision, mode=wanted.mode, modules=wanted.modules)
    say(f"{diff}\n")
    if wanted.json:
        write_json(wanted.json, to_json(diff))
    if wanted.plot:
        draw_diff(diff, wanted.plot)
    return int(diff.verdict is not Verdict.OK)


def find_model(place: str) -> "nn.Module":
    """Load a torch module from FILE.py:NAME; a class or function is called without arguments.

    Raises ConfigError: no such file, or no torch module of this name. Errors raised by the file's code pass through.
    """
    file, _, name = place.rpartition(":")
    if not Path(file).is_file():
        raise ConfigError(f"there is no Python file {file}", where="--model", do="--model model.py:Net")
    sys.path.insert(0, str(Path(file).parent.resolve()))  # its imports work as with `python FILE.py`
    space = run_path(file, run_name=Path(file).stem)
    from torch import nn  # noqa: PLC0415

    made: Any = space.get(name)
    made = made() if callable(made) and not isinstance(made, nn.Module) else made
    if not isinstance(made, nn.Module):
        what = f"{name} in {file} is no torch module"
        raise ConfigError(what, where="--model", do="name a module, or a function without arguments that returns one")
    return made
