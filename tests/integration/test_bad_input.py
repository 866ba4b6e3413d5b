"""Invalid settings, folders that cannot be written, damaged results: whole messages and exit codes."""

from pathlib import Path

import pytest
from integration.wording import message

from pipeline.cli import FAILED, run_command

SHAPE = "shape, model=embedded with F=1024 neurons a layer"


@pytest.mark.parametrize(
    ("words", "what", "where", "do"),
    [
        (
            ["stage=evalute"],
            "stage=evalute is none of all, scan, score, cluster, extract, assemble, project, train, evaluate, dump, "
            "diagnose",
            "setting stage",
            "stage=evaluate",
        ),
        (
            ["cluster=kmeans"],
            "cluster=kmeans is none of balanced_kmeans, contiguous, random, rank, router_aware",
            "setting cluster",
            "cluster=balanced_kmeans",
        ),
        (
            ["score.method=contributions"],
            "score.method=contributions is none of s_p, taylor, wanda, frequency, contribution, random",
            "setting score.method",
            "score.method=contribution",
        ),
        (
            ["model.dtype=float8"],
            "model.dtype=float8 is none of auto, float32, bfloat16, float16",
            "setting model.dtype",
            "model.dtype=float32",
        ),
        (
            ["assemble.rooter=random"],
            "there is no setting assemble.rooter",
            "command line",
            "assemble.router=random",
        ),
        (
            ["n=1025", "always_on=0"],
            "n=1025 needs at least 1025 neurons a layer that are not always on; there are 1024",
            f"{SHAPE}, 0 of them always on",
            "experts=12 n=64 top_k=4 always_on=256",
        ),
        (
            ["always_on=1000"],
            "n=64 needs at least 64 neurons a layer that are not always on; there are 24",
            f"{SHAPE}, 1000 of them always on",
            "top_k=4 always_on=256",
        ),
        (["top_k=17"], "top_k=17 is more than experts=16", SHAPE, "top_k=4 always_on=256"),
        (
            ["always_on=1024"],
            "always_on=1024 leaves no neuron to route; at most 1023 of 1024 can be always on",
            SHAPE,
            "top_k=4 always_on=256",
        ),
    ],
)
def test_settings_without_meaning(refused, words, what, where, do):
    assert refused(*words) == message(what, where, do)


def test_everything_wrong_is_told_at_once(refused, source, tmp_path):
    (source / "config.json").unlink()
    text = tmp_path / "empty.txt"
    text.write_text("")
    words = ["stage=scam", "score=foo", "experts=0", "model=local", f"model.path={source}"]
    assert refused(*words, "data=text", f"data.path={text}") == "\n".join(
        [
            message(
                "score=foo is none of contribution, frequency, random, s_p, taylor, wanda",
                "setting score",
                "score=contribution",
            ),
            message(
                "stage=scam is none of all, scan, score, cluster, extract, assemble, project, train, evaluate, dump, "
                "diagnose",
                "setting stage",
                "stage=scan",
            ),
            message("experts=0 must be at least 1", "setting experts", "experts=null"),
            message("the text is empty", f"data.path={text}", "data.path=text that holds something"),
            message(
                "no checkpoint: cannot read config.json (No such file or directory)",
                source,
                "model.path=<folder with config.json and model.safetensors>",
            ),
        ]
    )


def test_errors_that_depend_on_each_other_are_told_at_once(refused):
    better = "top_k=4 always_on=256 assemble.target=auto"
    assert refused("top_k=17", "always_on=1024", "assemble.target=mixtral") == "\n".join(
        [
            message("top_k=17 is more than experts=16", SHAPE, better),
            message("always_on=1024 leaves no neuron to route; at most 1023 of 1024 can be always on", SHAPE, better),
            message(
                "mixtral cannot hold the attention of qwen3",
                "assemble.target",
                "assemble.target=auto, or one of glm4_moe, dots1, tiny_onn",
            ),
        ]
    )


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that not even a superuser writes to")
def test_a_folder_that_cannot_be_written(refused):
    assert refused("output_dir=/proc/tiny-onn") == message(
        "cannot write to /proc: No such file or directory",
        "setting output_dir",
        "output_dir=outputs",
    )


def test_a_parent_that_lost_a_file(source, text, tmp_path, capsys):
    words = [
        *("model=local", f"model.path={source}", f"output_dir={tmp_path / 'outputs'}"),
        *("data=text", f"data.path={text}", "data.tokens=100", "data.heldout_tokens=50", "data.max_length=50"),
    ]
    assert run_command([*words, "stage=scan"]) == 0
    (lost,) = Path(tmp_path, "outputs", "artifacts", "local", "scan").glob("*/statistics.safetensors")
    lost.unlink()
    capsys.readouterr()
    assert run_command([*words, "stage=score"]) == FAILED
    assert capsys.readouterr().err == message(
        "the result of scan is damaged",
        f"{lost} is missing",
        f"python -m pipeline {' '.join(words)} stage=scan fresh=true",
    )
