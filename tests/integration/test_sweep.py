"""Jobs of a sweep that run at once: one of them computes the stages that they share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from integration.carving import words_of_pico
from pico import write_pico

pytestmark = pytest.mark.slow


def test_two_jobs_share_scan_and_score(text, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs pip install -e '.[sweeps]'")
    source = write_pico(tmp_path / "qwen3", "qwen3", tokenizer=True)
    words = [*words_of_pico(source, text), "data.sample_tokens=null", "cluster.map=none", "n=8", "top_k=2"]
    launcher = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.launcher.verbose=0"]
    dials = ["stage=cluster", "always_on=8", "experts=3,4", f"output_dir={tmp_path / 'outputs'}"]
    repository = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pipeline", *launcher, *words, *dials]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(repository), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    said = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for stage in ("scan", "score"):
        assert sum(line.startswith(f"{stage} done in") for line in said) == 1
        assert sum(line.startswith(f"{stage} kept from an earlier run") for line in said) == 1
    assert sum(line.startswith("cluster done in") for line in said) == 2
    table = said[next(place for place, line in enumerate(said) if line.startswith("2 runs in ")) :]
    assert [line for line in table if "experts=" in line] == [
        f"{job} cluster – – – – experts={3 + job}" for job in (0, 1)
    ]
    published = [folder.parent.name for folder in (tmp_path / "outputs" / "artifacts").glob("*/*/[!.]*")]
    assert sorted(published) == ["cluster", "cluster", "scan", "score"]
    assert not list((tmp_path / "outputs").rglob("*.lock"))
