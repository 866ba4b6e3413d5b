"""What the README says about the tree and the command line is so."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pipeline.overrides import override_errors
from pipeline.settings import compose, register_schema
from pipeline.stages_table import STAGES

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()


def map_of_the_house():
    """Folder → whether the map has it at top level; nested folders carry their parent."""
    block = re.search(r"## The house\n\n```\n(.*?)```", README, re.S).group(1)
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
    assert set(map_of_the_house()) <= tracked_folders()


def test_the_map_leaves_nothing_out():
    """Top level, what stages share, and the packages of models and instruments."""
    stages = {Path("stages") / name for name in STAGES}
    depth = {folder for folder in tracked_folders() if len(folder.parts) == 1 and not folder.name.startswith(".")}
    depth |= {
        folder for folder in tracked_folders() if folder.parent in {Path("stages"), Path("models"), Path("instruments")}
    } - stages
    assert depth == set(map_of_the_house())


def test_linked_pictures_are_in_the_repository():
    for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (REPOSITORY / name).is_file(), name


COMMANDS = re.findall(r"^    python -m pipeline (.*?)(?:  +#.*)?$", README, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes(command):
    words = shlex.split(command)
    if words == ["--help"]:
        return
    register_schema()
    assert not override_errors(words, sweep=False)
    settings, _folder = compose(words)
    assert settings.stage in {"all", *STAGES}


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 4
