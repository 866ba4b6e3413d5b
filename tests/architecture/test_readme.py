"""The READMEs' statements about the tree and the command line are true."""

import csv
import re
import shlex
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import tiny_onn
from instruments.tensor_dump.config import ENABLED, FOLDER, QUANT_TYPE
from pipeline.__main__ import _do
from pipeline.check import contradictions, find_errors
from pipeline.help import PROGRAMS
from pipeline.overrides import expand_words, override_errors
from pipeline.settings import STAGES, compose
from stages.accumulators.redis_store import FIELDS

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
PACKAGES = ("pipeline", "stages", "models", "instruments")
INSTRUMENTS = sorted(page.relative_to(REPOSITORY) for page in (REPOSITORY / "instruments").glob("*/README.md"))
PAGES = [Path("README.md"), Path("CONTRIBUTING.md"), *(Path(name) / "README.md" for name in PACKAGES), *INSTRUMENTS]
# Rows that CONTRIBUTING's table of extensions must have.
ADDED = ("a score", "a router", "a MoE target", "a text source", "a baseline")


def readme_folders():
    """The folders of the README's map, nested ones with their parent."""
    block = re.search(r"## Folders\n\n```\n(.*?)```", README, re.S).group(1)
    folders, parent = [], Path()
    for line in block.splitlines():
        indent, name = re.match(r"( *)(\S+)/", line).groups()
        parent = parent if indent else Path(name)
        folders.append(parent / name if indent else parent)
    return folders


def tracked_folders():
    files = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return {parent for name in files.splitlines() for parent in Path(name).parents} - {Path()}


def test_every_folder_of_the_map_exists():
    assert set(readme_folders()) <= tracked_folders()


def test_the_map_leaves_nothing_out():
    """Top level, shared folders of stages, and packages of models and instruments."""
    stages = {Path("stages") / name for name in STAGES}
    depth = {folder for folder in tracked_folders() if len(folder.parts) == 1 and not folder.name.startswith(".")}
    depth |= {
        folder for folder in tracked_folders() if folder.parent in {Path("stages"), Path("models"), Path("instruments")}
    } - stages
    assert depth == set(readme_folders())


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_is_short(page):
    assert len((REPOSITORY / page).read_text().splitlines()) <= 150


def test_the_changelog_begins_with_the_version_that_is_cited():
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    cited = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    (newest, day), *_older = re.findall(r"^## (\S+) \((.+)\)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.M)
    assert (newest, day) == (version, str(cited["date-released"]))
    assert cited["version"] == version


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", (REPOSITORY / page).read_text()):
        name, _, anchor = target.partition("#")
        linked = (REPOSITORY / page).parent / name
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", linked.read_text(), re.M)
            assert anchor in {title.lower().replace(" ", "-") for title in titles}, target


def test_contributing_names_the_file_for_what_is_added():
    lines = (REPOSITORY / "CONTRIBUTING.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    rows = {words[0]: words[1:] for words in table if words[0].startswith("a ")}
    assert set(ADDED) <= rows.keys()
    for places in rows.values():
        for name in re.findall(r"`([^`]+/[^`]*)`", " ".join(places)):
            assert (REPOSITORY / name).exists(), name


COMMANDS = sorted(
    {
        command
        for page in PAGES
        for command in re.findall(r"^    python -m pipeline (.*?)(?:  +#.*)?$", (REPOSITORY / page).read_text(), re.M)
    }
)


PROGRAM_COMMANDS = [command for command in COMMANDS if command.partition(" ")[0] in {"--help", *PROGRAMS}]


@pytest.mark.parametrize("command", PROGRAM_COMMANDS)
def test_every_command_of_a_program_has_only_words_that_it_knows(command, monkeypatch):
    parse = ArgumentParser.parse_args
    monkeypatch.setattr(ArgumentParser, "parse_args", lambda *given: sys.exit(parse(*given) is None))
    with pytest.raises(SystemExit) as ended:
        sys.exit(_do(shlex.split(command)))
    assert not ended.value.code


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in PROGRAM_COMMANDS])
def test_every_command_composes(command):
    words = expand_words(shlex.split(command))
    sweep = "-m" in words[:1]
    words = words[sweep:]
    assert not override_errors(words, sweep=sweep)
    words = [re.sub(r",.*", "", word) if sweep else word for word in words]
    settings, _folder = compose(words)
    assert settings.stage in {"all", *STAGES}
    kinds = settings.model.kind, settings.data.kind, settings.store.kind
    if kinds == ("embedded", "python_stdlib", "local") and not settings.diagnose.checkpoint:  # others have to be there
        assert find_errors(settings, words) == []


TORCHRUN = sorted(
    {
        pair
        for page in PAGES
        for pair in re.findall(
            r"^    torchrun --nproc-per-node=(\d+) -m pipeline *(.*?)(?: *#.*)?$", (REPOSITORY / page).read_text(), re.M
        )
    }
)


@pytest.mark.parametrize(("workers", "command"), TORCHRUN)
def test_every_command_fits_its_number_of_processes(workers, command, monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": workers, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    settings, _folder = compose(expand_words(shlex.split(command)))
    assert [*contradictions(settings)] == []


def test_there_are_commands_to_check():
    assert len(PROGRAM_COMMANDS) >= 4
    assert len(COMMANDS) - len(PROGRAM_COMMANDS) >= 4
    assert len(TORCHRUN) >= 4


SCENARIOS = "## Three scenarios"
BLOCKS = [
    pytest.param(page, code, id=f"{page} {number}")
    for page in (Path("instruments/README.md"), *INSTRUMENTS)
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text().partition(SCENARIOS)[0], re.S)
    )
]


def tiny_llama(layers=1):
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 12) | {"num_hidden_layers": layers, "vocab_size": 31}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_attention_heads=2, **sizes))


BATCH = {"input_ids": torch.arange(7)[None], "labels": torch.arange(7)[None]}


@pytest.mark.parametrize(("page", "code"), BLOCKS)
def test_examples_of_instruments_run(page, code, tmp_path, monkeypatch, capsys):
    """Every example prints or writes something; those of instruments/README.md have at most five lines."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("loss = binary_cross_entropy(model(x).half().softmax(-1), y)\n")
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    exec(code, {
        "model": model, "batch": BATCH, "batches": [BATCH, BATCH], "optimizer": optimizer, "nn": torch.nn,
        "scaler": torch.amp.GradScaler("cpu"),
        "gradient": torch.ones(3, 5), "path": "scan.mscan",
    })  # fmt: skip
    assert page != Path("instruments/README.md") or len([line for line in code.splitlines() if line]) <= 5
    assert capsys.readouterr().out or [path for path in tmp_path.iterdir() if path.name != "train.py"]


@pytest.fixture
def run_scenario(tmp_path, monkeypatch, capsys):
    """Runs the code of a scenario of instruments/README.md, then its command; returns exit code and output."""
    monkeypatch.chdir(tmp_path)

    def run(number, **names):
        section = (REPOSITORY / "instruments/README.md").read_text().partition(SCENARIOS)[2].split("### ")[number]
        exec(re.search(r"```python\n(.*?)```", section, re.S)[1], names | {"torch": torch, "batch": BATCH})
        tool, *words = re.search(r"^    python -m pipeline (.*)$", section, re.M)[1].split()
        return import_module(PROGRAMS[tool][0]).main(words), capsys.readouterr().out

    return run


@pytest.mark.parametrize("fails", [True, False])
def test_the_scenario_of_a_layer_that_fails_in_half_precision(run_scenario, fails):
    torch.manual_seed(0)  # with some weights the queries stay below the limit of float16
    model = tiny_llama(layers=3)
    if fails:
        model.model.layers[1].self_attn.q_proj.weight.data.fill_(3e4)  # queries beyond float16
    code, out = run_scenario(1, model=model)
    assert (code, ", 0 differ" in out) == ((3, False) if fails else (0, True))
    if fails:
        first = out.split("first divergence, in the order of capture\n")[1].splitlines()[1]
        assert first.split()[:2] == ["model.layers.1.self_attn.q_proj", "output"]


@pytest.mark.parametrize("fails", [True, False])
def test_the_scenario_of_a_training_loop(run_scenario, fails, tmp_path):
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), 1e6 if fails else 0.1)
    code, out = run_scenario(2, model=model, optimizer=optimizer, batches=[BATCH] * 6)
    assert code == 0
    assert out.startswith("6 steps, 0 to 5; ")
    assert ("0 findings" in out) != fails
    assert (tmp_path / "steps.png").exists()


@pytest.mark.parametrize("changed", [True, False])
def test_the_scenario_of_two_checkpoints(run_scenario, changed, tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "base")
    if changed:
        model.model.layers[0].mlp.up_proj.weight.data.mul_(3)
    model.save_pretrained(tmp_path / "tuned")
    code, _out = run_scenario(3)
    with (tmp_path / "change.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert code == 0
    assert len(rows) == len([name for name, _ in model.named_parameters() if "norm" not in name])
    assert any(float(row["delta_sc"]) for row in rows) == changed


def test_every_name_of_the_documents_has_one_here():
    table = (REPOSITORY / "instruments/README.md").read_text().partition("## Names in the specification")[2]
    rows = [row.split("|")[1:3] for row in table.splitlines()[4:]]
    assert len(rows) >= 7
    in_redis = {field for places in FIELDS.values() for _projection, field in places}
    for theirs, ours in rows:
        names = [name for name in re.findall(r"`(\w+)`", ours + theirs * ("the same" in ours)) if name != "tiny_onn"]
        modules = [shlex.split(words)[2:4] for words in re.findall("`(python -m .+?)`", ours)]
        assert names or modules, theirs
        assert {*names} <= {*tiny_onn.__all__, ENABLED, FOLDER, QUANT_TYPE, *in_redis}
        assert all({*tool} <= {*PROGRAMS} if module == "pipeline" else find_spec(module) for module, *tool in modules)
