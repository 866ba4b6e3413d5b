"""Places of files and folders, independent of the working folder."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CONF = REPOSITORY / "conf"
# Groups whose options touch any setting.
OVERLAYS = ("experiment", "debug")


def groups() -> dict[str, list[str]]:
    """Configuration groups and their options, read from the folders under conf/."""
    folders = sorted(folder for folder in CONF.iterdir() if folder.is_dir())
    return {folder.name: sorted(option.stem for option in folder.glob("*.yaml")) for folder in folders}


def artifact_folder(output_dir: Path, label: str, stage: str, fingerprint: str) -> Path:
    """Folder of the published result of one stage: `artifacts/<model>/<stage>/<fingerprint>`."""
    return output_dir / "artifacts" / label / stage / fingerprint[:16]


def hashes_file(output_dir: Path) -> Path:
    """Where the hashes of large files are remembered."""
    return output_dir / "artifacts" / "hashes.json"
