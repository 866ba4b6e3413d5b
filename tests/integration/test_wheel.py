"""The wheel: one package, tiny_onn, that works in any folder and shadows nobody's modules."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_onn

REPOSITORY = Path(__file__).parents[2]
QUICK = {"cluster": "random", "cluster.map": "none", "scan": "forward_only", "vocabulary": "none", "data.tokens": 512}
FOREIGN = ("models.py", "stages/__init__.py", "pipeline/__init__.py", "instruments/__init__.py", "conf.py")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment with the wheel and the libraries it needs, but no clone."""
    root = tmp_path_factory.mktemp("wheel")
    source, environment = root / "source", root / "environment"  # pip writes into the folder that it builds
    shutil.copytree(REPOSITORY, source, ignore=shutil.ignore_patterns(".*", "outputs", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", root, source], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (wheel,) = root.glob("*.whl")
    subprocess.run([*pip, "--python", environment, "install", "--no-deps", "--no-index", wheel], check=True)
    # A folder named in a .pth file brings its packages, but not its own .pth files, so not the editable install.
    libraries = "\n".join(path for path in sys.path if path.endswith("site-packages"))
    next(environment.glob("lib/*/site-packages")).joinpath("libraries.pth").write_text(libraries)
    project = root / "project"
    for name in FOREIGN:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("OWNER = 'somebody else'\n")
    return environment, project


def run(installed, program, *words):
    environment, project = installed
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [environment / "bin" / program, *words]
    return subprocess.run(command, check=False, cwd=project, env=variables, capture_output=True, text=True)


def test_the_wheel_holds_one_package(installed):
    environment, _project = installed
    (packages,) = environment.glob("lib/*/site-packages")
    assert {path.name for path in packages.iterdir() if path.is_dir()} - {"__pycache__"} == {
        "tiny_onn", next(packages.glob("*.dist-info")).name
    }  # fmt: skip
    assert (packages / "tiny_onn/py.typed").is_file()


def test_the_command_carves_in_a_foreign_folder(installed):
    """The settings, the embedded model and the templates are in the wheel; results go to the working folder."""
    _python, project = installed
    words = (f"{name}={value}" for name, value in QUICK.items())
    done = run(installed, "tiny-onn", "debug=tiny", "stage=assemble", *words)
    assert done.returncode == 0, done.stderr
    assert (project / "outputs/latest/checkpoint/config.json").is_file()
    assert "tiny-onn" in done.stdout
    assert "python -m pipeline" not in done.stdout


def test_a_notebook_carves_and_goes_on_with_its_own_modules(installed):
    code = (
        f"QUICK = {QUICK}"
        + """
from tiny_onn import carve
import models, stages, pipeline, instruments
assert {module.OWNER for module in (models, stages, pipeline, instruments)} == {"somebody else"}
result = carve(stage="assemble", debug="tiny", settings=QUICK)
assert (result.checkpoint / "config.json").is_file()
assert result.table.rows and set(result.figures) == {str(row[0]) for row in result.table.rows}
from tiny_onn.instruments.errors import ConfigError
try:
    carve("no such model")
except ConfigError as error:
    print("refused:", error)
try:
    carve(expets=100)
except ConfigError as error:
    print("refused:", error)
"""
    )
    done = run(installed, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused:") == 2
    assert "experts=100" in done.stdout


def test_every_public_name_is_there_and_an_instrument_loads_little(installed):
    code = """
import sys, tiny_onn
from tiny_onn import static_check
assert "torch" not in sys.modules
from tiny_onn import watch_model, check_loss_scale, analyze_tensor, auto_diff, TensorDump, ParameterTensorScanner
from tiny_onn import save_attention_tensors, save_linear_tensors
assert not {"transformers", "matplotlib", "sklearn", "hydra"} & {*sys.modules}
assert {getattr(tiny_onn, name).__module__.partition(".")[0] for name in tiny_onn.__all__} == {"tiny_onn"}
"""
    done = run(installed, "python", "-c", code)
    assert done.returncode == 0, done.stderr


def test_a_tool_is_a_word_of_the_command(installed):
    done = run(installed, "tiny-onn", "dump", "--help")
    assert done.returncode == 0, done.stderr
    assert "usage: tiny-onn dump" in done.stdout


def test_a_remedy_names_the_command_that_is_installed(installed):
    _environment, project = installed
    (project / "outputs").mkdir(exist_ok=True)
    done = run(installed, "tiny-onn", "runs", "remove", "runs/none")
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith(f"do:    tiny-onn runs --output-dir {project / 'outputs'}\n")


def test_a_clone_has_the_same_names():
    assert {getattr(tiny_onn, name).__module__.partition(".")[0] for name in tiny_onn.__all__} == {
        "instruments", "pipeline"
    }  # fmt: skip
