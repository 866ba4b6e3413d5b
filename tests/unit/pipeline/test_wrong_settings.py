"""Wrong settings, each refused before anything is loaded; every remedy, pasted behind the same command, helps."""

import re
import shlex

import pytest

from pipeline.overrides import first_word, override_errors
from pipeline.settings import STAGES, compose, register_schema
from pipeline.validate import field_errors, find_errors

WRONG = [
    *(f"{name}={value}" for name in ("active", "project.beta", "train.router_rate") for value in ("nan", "inf")),
    *("active=-inf", "project.penalties=[nan]", "project.alpha=inf", "assemble.ridge_penalty=nan", "data.tokens=1e99"),
    *("store.checkpoint_every=inf", "train.batch=1000000 train.micro_batch=1000000", "data.heldout_share=nan"),
    *("seed=12345678901234567890123", "seed=4294967296", "data.tokens=12345678901234567890123", "experts=0", "n=-3"),
    *("scan.parameter_patterns=abc", "scan.parameter_patterns=[]", "project.penalties=[]", "project.matrices=[]"),
    *("project.penalties=[0]", "project.matrices=[gat]", "dump.tensors=[]", "dump.modules=[]", "dump.tensors=[wait]"),
    *("train.micro_batch=0", "train.micro_batch=1000000", "train.batch=0", "train.fsdp=true", "train.router_rate=0"),
    *("dump.ranks=[7]", "dump.first_step=5", "dump.ranks=[]", "assemble.pad_to=1000000000", "fresh=2", "fresh=0.5"),
    *("model.device=mps", "model.device=meta", "model.device=foo", "model.device=''", "model.device=cuda:-1"),
    *(f"model.label={'x' * 300}", "'model.label=\"a\nb\"'", "'model.label=\"\x1b[31mred\"'", "model.label=.."),
    *(
        "output_dir=",
        "'output_dir=\" \"'",
        "output_dir=null",
        "model.path=/a=b",
        "model.path=/a!b",
        "'model.path=/a(b)'",
    ),
    *("top_k=2.5", "experts=many", "scan.gradients=perhaps", "diagnose.checkpoint=/nowhere", "cluster.map_layers=[99]"),
]


def stage_of(word):
    group = first_word(word)
    return f"stage={group if group in STAGES else 'project'}"


def find_faults(words):
    """What the command says of these words: (message, remedy)."""
    register_schema()
    faults = override_errors(words, sweep=False)
    found = [error for errors in faults.values() for error in errors]
    settings, _folder = compose([word for word in words if word not in faults])
    return [*found, *find_errors(settings, doubtful={first_word(word) for word in faults})]


@pytest.mark.parametrize("typed", WRONG)
def test_wrong_settings_are_refused_and_the_remedy_helps(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = [stage_of(typed), "output_dir=outputs"]
    words = shlex.split(typed)
    wrong = {error.what: error for error in find_faults([*base, *words])}
    assert wrong, typed
    for error in wrong.values():
        remedy = shlex.split(re.split(r",? or | for ", error.do)[0].rstrip(","))
        replaced = {word.partition("=")[0] for word in remedy}
        kept = [word for word in [*base, *words] if word.partition("=")[0] not in replaced]
        assert error.what not in {left.what for left in find_faults([*kept, *remedy])}, error.do


def test_no_word_reaches_hydra_that_would_write_to_the_root(tmp_path, monkeypatch, capsys):
    from pipeline.cli import run_command

    monkeypatch.chdir(tmp_path)
    assert run_command(["-m", "output_dir=", "seed=0,1"]) == 2
    assert capsys.readouterr().err == (
        "output_dir is empty: is a variable of the shell not set?\n"
        "  where: setting output_dir\n  do:    output_dir=outputs\n"
    )


def test_a_value_with_special_characters_is_quoted_for_shell_and_command():
    (error,) = override_errors(["model.path=/my (new) models/it's=1!"], sweep=False).popitem()[1]
    assert "needs quotes" in error.what
    (word,) = shlex.split(error.do)
    assert override_errors([word], sweep=False) == {}
    assert compose([word])[0].model.path == "/my (new) models/it's=1!"


def test_a_rule_of_every_number_at_any_depth():
    from dataclasses import fields, is_dataclass, replace

    settings = compose([])[0]

    def numbers(node, prefix=""):
        for spec in fields(node):
            value = getattr(node, spec.name)
            if is_dataclass(value):
                yield from numbers(value, f"{prefix}{spec.name}.")
            elif isinstance(value, float):
                yield f"{prefix}{spec.name}", replace(node, **{spec.name: float("nan")})

    found = dict(numbers(settings))
    assert len(found) > 20
    for name, node in found.items():
        broken = [error.what for error in field_errors(node) if "finite" in error.what]
        assert broken == [f"{name.rpartition('.')[2]}=nan must be a finite number"], name
