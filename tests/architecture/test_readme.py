"""The READMEs' statements about the tree and the command line are true."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.__main__ import TOOLS
from pipeline.check import contradictions, find_errors
from pipeline.overrides import override_errors
from pipeline.settings import STAGES, compose
from pipeline.words import expand_words

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
PACKAGES = ("pipeline", "stages", "models", "instruments")
INSTRUMENTS = sorted(page.relative_to(REPOSITORY) for page in (REPOSITORY / "instruments").glob("*/README.md"))
PAGES = [Path("README.md"), *(Path(name) / "README.md" for name in PACKAGES), *INSTRUMENTS]
# Rows that the README's table of extensions must have.
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


def test_the_map_names_the_file_for_what_is_added():
    rows = {words[0]: words[1:] for words in table_rows() if words[0].startswith("a ")}
    assert set(ADDED) <= rows.keys()
    for places in rows.values():
        for name in re.findall(r"`([^`]+/[^`]*)`", " ".join(places)):
            assert (REPOSITORY / name).exists(), name


def table_rows():
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in README.splitlines() if line[:1] == "|"]


COMMANDS = sorted(
    {
        command
        for page in PAGES
        for command in re.findall(r"^    python -m pipeline (.*?)(?:  +#.*)?$", (REPOSITORY / page).read_text(), re.M)
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes(command):
    words = expand_words(shlex.split(command))
    if command.startswith("--") or command.partition(" ")[0] in TOOLS:  # flags or another program, no settings
        return
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
    settings, _folder = compose(shlex.split(command))
    assert [*contradictions(settings)] == []


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 4
    assert len(TORCHRUN) >= 4


BLOCKS = [
    pytest.param(page, code, id=f"{page} {number}")
    for page in (Path("instruments/README.md"), *INSTRUMENTS)
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(), re.S))
]


@pytest.mark.parametrize(("page", "code"), BLOCKS)
def test_examples_of_instruments_run(page, code, tmp_path, monkeypatch, capsys):
    """Every example prints or writes something; those of instruments/README.md have at most five lines."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("loss = binary_cross_entropy(model(x).half().softmax(-1), y)\n")
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 12) | {"num_hidden_layers": 1, "vocab_size": 31}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_attention_heads=2, **sizes))
    batch = {"input_ids": torch.arange(7)[None], "labels": torch.arange(7)[None]}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    exec(code, {
        "model": model, "batch": batch, "batches": [batch, batch], "optimizer": optimizer, "nn": torch.nn,
        "scaler": torch.amp.GradScaler("cpu"),
        "gradient": torch.ones(3, 5), "path": "scan.mscan",
    })  # fmt: skip
    assert page != Path("instruments/README.md") or len([line for line in code.splitlines() if line]) <= 5
    assert capsys.readouterr().out or [path for path in tmp_path.iterdir() if path.name != "train.py"]
