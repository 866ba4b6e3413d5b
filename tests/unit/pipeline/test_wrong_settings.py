"""Wrong settings are refused before anything is loaded; each remedy, added to the same command, removes its error."""

import re
import shlex
from functools import cache

import pytest

from pipeline.check import MAX_COUNTS, find_errors, find_fields, value_errors
from pipeline.help import CONF
from pipeline.overrides import first_word, override_errors, parse_overrides
from pipeline.settings import STAGES, compose

WRONG = [
    *(f"{name}={value}" for name in ("active", "project.beta", "train.router_rate") for value in ("nan", "inf")),
    *("active=-inf", "project.penalties=[nan]", "project.alpha=inf", "assemble.ridge_penalty=nan", "data.tokens=1e99"),
    *("store.checkpoint_every=inf", "train.batch=1000000 train.micro_batch=1000000", "data.heldout_share=nan"),
    *("seed=12345678901234567890123", "seed=4294967296", "data.tokens=12345678901234567890123", "experts=0", "n=-3"),
    *("scan.parameter_patterns=abc", "scan.parameter_patterns=[]", "project.penalties=[]"),
    *("project.penalties=[0]", "dump.tensors=[]", "dump.modules=[]", "dump.tensors=[wait]"),
    *("train.micro_batch=0", "train.micro_batch=1000000", "train.batch=0", "train.fsdp=true", "train.router_rate=0"),
    *("assemble.pad_to=1000000000", "fresh=0.5"),
    *("model.device=mps", "model.device=meta", "model.device=foo", "model.device=''", "model.device=cuda:-1"),
    *(f"model.label={'x' * 300}", "'model.label=\"a\nb\"'", "'model.label=\"\x1b[31mred\"'", "model.label=.."),
    *("output_dir=", "'output_dir=\" \"'", "model.path=/a=b", "model.path=/a!b", "'model.path=/a(b)'"),
    f"output_dir={'x' * 300}",
    *("'output_dir=\"~/x\"'", "'output_dir=\"~nobody/x\"'"),
    "scan.block_width=9223372036854775807",
    *("assemble.router_steps=1000001", "project.rounds=1001", "assemble.router_tokens=1000000000001"),
    *("top_k=2.5", "experts=many", "scan.gradients=perhaps", "diagnose.checkpoint=/nowhere", "cluster.map_layers=[99]"),
    *("dump.enabled=false", "dump.folder=/usr", "dump.gradients=false dump.tensors=[grad_output]"),
    "dump.quant_type=mx",
    "stage=train assemble.logit_std=0",
    *("model.path=/x", "model.revision=v2"),
    *("train.router_share=0.9 train.all_share=0.2", "train.language_model=0", "train.batch=5"),
    "stage=train train.balance=selection_bias",
    "train.straight_through=true topology=global_pool",
    *("score.activation_weight=0 score.gradient_weight=0 score.frequency_weight=0", "score=taylor scan=forward_only"),
    *("dense_layers=[99]", "dense_layers=[0] topology=global_pool", "dense_layers=auto topology=global_pool"),
    "dense_layers=auto top_k=4 always_on=256",
    *("active=0.25 dense_layers=[0,1]", "n=100000", "experts=4 top_k=9", "always_on=99999", "assemble.target=nope"),
    *("assemble.target=mixtral", "assemble.target=qwen3_moe always_on=128"),
    "topology=global_pool assemble.target=mixtral",
    *("model.gpu_memory=20GiB", "model.device_map=auto model.cpu_memory=lots", "store=redis store.url=here"),
    *("store=redis store.url=http://a:1", "data.max_length=1", "data=mixture", "data.labels=none"),
    *(
        f"data=mixture data.sources=[{{path:{CONF},name:b,share:1}}]",
        "assemble.router=eror",
        "data.tokens=5 data.max_length=64",
    ),
]


@cache
def composed(*words):
    return compose(words)[0]


def find_faults(words):
    """Errors that the command reports for these words."""
    faults = override_errors(words, sweep=False)
    found = [error for errors in faults.values() for error in errors]
    sound = [word for word in words if word not in faults]
    return [*found, *find_errors(composed(*sound), sound, {first_word(word) for word in faults})]


@pytest.mark.parametrize("typed", WRONG)
def test_wrong_settings_are_refused_and_the_remedy_helps(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stages.accumulators.redis_connection.OPENING_TRIES", 0)
    group = first_word(typed)
    base = [f"stage={group if group in STAGES else 'project'}", "output_dir=outputs"]
    words = shlex.split(typed)
    wrong = {error.what: error for error in find_faults([*base, *words])}
    assert wrong, typed
    for error in wrong.values():
        remedy = shlex.split(re.split(r",? or | for ", error.do)[0].rstrip(","))
        replaced = {word.partition("=")[0] for word in remedy}
        assert override_errors(remedy, sweep=False) == {}, error.do
        kept = [word for word in [*base, *words] if word.partition("=")[0] not in replaced]
        assert error.what not in {left.what for left in find_faults([*kept, *remedy])}, error.do


@pytest.mark.parametrize(
    "words",
    [
        *(["model=local", f"model.path={'x' * 300}", "data=python_stdlib"], ["model.path=/x"]),
        *([f"data.heldout_path={'x' * 300}"], ["data=text", f"data.path=/{'x/' * 2500}"]),
        ["stage=diagnose", f"diagnose.checkpoint={'x' * 300}"],
    ],
)
def test_a_path_that_the_system_does_not_take_is_an_error_of_the_settings(words, tmp_path):
    assert find_faults([*words, f"output_dir={tmp_path}"])


@pytest.mark.parametrize("key", ["model.path", "data.sources.0.path", "hydra.run.dir"])
@pytest.mark.parametrize("folder", ["/my (new) models/it's=1!", "/mein Ordner/été 1", "/模型/qwen"])
def test_a_path_that_hydra_cannot_read_is_quoted_for_shell_and_command(key, folder):
    (error,) = override_errors([f"{key}={folder}"], sweep=False).popitem()[1]
    assert "cannot be read" in error.what
    (word,) = shlex.split(error.do)
    assert override_errors([word], sweep=False) == {}
    assert parse_overrides([word])[0].value() == folder


def test_a_rule_of_every_number_at_any_depth():
    found = {name: spec for name, value, spec in find_fields(compose([])[0]) if isinstance(value, float)}
    assert len(found) > 20
    for name, spec in found.items():
        broken = [error.what for error in value_errors(name, float("nan"), spec) if "finite" in error.what]
        assert broken == [f"{name}=nan must be a finite number"]


def test_every_number_of_steps_rounds_and_tokens_has_a_maximum():
    found = {name: spec for name, _value, spec in find_fields(compose([])[0]) if name.endswith(tuple(MAX_COUNTS))}
    assert len(found) > 20
    assert [name for name, spec in found.items() if not any(value_errors(name, 10**13, spec))] == []


def test_results_are_not_written_into_the_text(tmp_path):
    (tmp_path / "a.txt").write_text("words " * 1000)
    for inside, faults in (("runs", 1), ("../runs", 0)):
        words = ["data=text", f"data.path={tmp_path}", "data.heldout_share=0.5", f"output_dir={tmp_path / inside}"]
        found = [error for error in find_faults(words) if "files in output_dir" in error.what]
        assert len(found) == faults


@pytest.mark.parametrize(
    "words", [["--shell-completion"], ["--exp", "/etc/hostname"], ["--resolve"], ["-m", "hydra.output_subdir=/proc/x"]]
)
def test_what_hydra_cannot_do_is_an_error_in_words(words, tmp_path, monkeypatch, capsys):
    from pipeline.cli import run_command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pipeline"])
    assert run_command([*words, "stage=scan", "plan=true", f"output_dir={tmp_path}"]) == 2
    assert "  do:    " in capsys.readouterr().err
