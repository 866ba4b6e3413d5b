"""Builds the wheel: the repository's folders become parts of tiny_onn, so that they shadow no module of the user."""

import re
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree

from setuptools import setup
from setuptools.command.build_py import build_py

OURS = "pipeline|stages|models|instruments"
# Of each line of code or of settings: the pattern, and the text in the wheel.
REWRITTEN = [
    (rf"^(\s*)from ({OURS})\b", r"\1from tiny_onn.\2"),
    (rf"^(\s*)import ({OURS})$", r"\1from tiny_onn import \2"),
    (rf"^(\s*)import ({OURS})\.", r"\1import tiny_onn.\2."),
    (r"python -m pipeline\b", "tiny-onn"),
    (r"(torchrun \S+) -m pipeline\b", r"\1 -m tiny_onn.pipeline"),
    (rf"python -m ({OURS})\.", r"python -m tiny_onn.\1."),
]


class BuildPackage(build_py):
    """Copies the repository's folders below tiny_onn and rewrites their imports; an editable install stays a clone."""

    def run(self) -> None:
        """Write the package `tiny_onn` to the build folder."""
        if self.editable_mode:
            super().run()
            return
        package = Path(self.build_lib) / "tiny_onn"
        rmtree(self.build_lib, ignore_errors=True)  # an earlier build's files would be packed as well
        copytree("tiny_onn", package, ignore=ignore_patterns("__pycache__"))
        for folder in (*OURS.split("|"), "conf"):
            copytree(folder, package / folder, ignore=ignore_patterns("__pycache__", "*.md"))
        for path in [*package.rglob("*.py"), *package.rglob("*.yaml")]:
            text = path.read_text(encoding="utf-8")
            for pattern, replacement in REWRITTEN:
                text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
            path.write_text(text, encoding="utf-8")


setup(cmdclass={"build_py": BuildPackage})
