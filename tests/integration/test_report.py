"""The report page of a real run, also in a browser."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from stages.artifacts.rendering import in_mib

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
LIGHT, DARK = (0xFC, 0xFC, 0xFB), (0x15, 0x17, 0x1B)  # --paper of pipeline/page.css


@pytest.fixture(scope="module")
def run(carves) -> Path:
    """The folder of the run that carved the embedded model."""
    return find_run(carves["embedded"].evaluation)


def find_run(result: Path) -> Path:
    """The run that ended with a published result."""
    for record in result.parents[3].glob("runs/*/stages.json"):
        last = json.loads(record.read_text())["stages"][-1:]
        if [(stage["stage"], stage["fingerprint"][:16]) for stage in last] == [(result.parent.name, result.name)]:
            return record.parent
    pytest.fail(f"no run ended with {result}")


def test_a_run_with_an_evaluation_ends_with_a_page(run, carves):
    page = (run / "report.html").read_text()
    models = json.loads((carves["embedded"].evaluation / "evaluation.json").read_text())["models"]
    for name in models:
        assert f"{models[name]['gap']:+.4f}" in page
    assert f"report     {run / 'report.html'}" in (run / "run.log").read_text()


def test_the_log_says_what_the_record_says(run):
    stages, log = json.loads((run / "stages.json").read_text())["stages"], (run / "run.log").read_text()
    assert stages[-1]["stage"] == "evaluate"
    for stage in stages:
        if stage["seconds"] is not None:
            figures = f"{stage['seconds']:.1f} s, peak memory {in_mib(stage['peak_bytes'])}, "
            assert f"{stage['stage']:9} done in {figures}" in log
        assert stage["fingerprint"][:16] in log


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium to show the page in: apt install chromium")
@pytest.mark.parametrize(("theme", "paper"), [("light", LIGHT), ("dark", DARK)])
@pytest.mark.parametrize("width", [380, 1600])
def test_a_browser_shows_it_without_complaint(run, tmp_path, theme, paper, width):
    """In a frame of this width, since a window cannot be as narrow as a phone."""
    (tmp_path / "page.html").write_text((run / "report.html").read_text())
    frame = f"<iframe src='page.html' style='position:fixed;inset:0;border:0;width:{width}px;height:2000px'></iframe>"
    (tmp_path / "frame.html").write_text(frame)
    picture = tmp_path / "picture.png"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars"]
    command += [f"--blink-settings=preferredColorScheme={theme == 'light':d}"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2000", f"--screenshot={picture}"]
    done = subprocess.run(
        [*command, (tmp_path / "frame.html").as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr
    pixels = np.round(imread(picture)[:, :width, :3] * 255).astype(int)
    edges = np.concatenate([pixels[:, :8].reshape(-1, 3), pixels[:, width - 8 : width].reshape(-1, 3)])
    assert (edges == paper).all()  # nothing runs over the margins
    assert (pixels != paper).any(-1).mean() > 0.05
