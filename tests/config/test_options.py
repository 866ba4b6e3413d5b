"""Every option composes and is explained; the plan of well-known models, from their configurations alone."""

import json
import re
import time
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import get_type_hints

import pytest
import yaml
from config.model_sizes import CONFIGS, SHAPES
from omegaconf import OmegaConf
from pico import decoder_of
from studies.real_model import HEALING, ROWS, row_settings

from models.finding import find_decoder
from pipeline.check import request_shape
from pipeline.cli import run_command
from pipeline.help import CONF, PROGRAMS, groups, help_page
from pipeline.overrides import override_errors, quote
from pipeline.settings import Settings, compose
from pipeline.shape import resolve_shape
from stages.train.loop import is_due


@cache
def composed(*words):
    """The settings that these words select. Read-only."""
    return compose(words)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_plan_of_a_well_known_model(name, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "0123abc"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    (folder / "model.safetensors").touch()  # never opened
    monkeypatch.setattr("models.source.hf_hub_download", lambda *_args, **_more: str(folder / "config.json"))
    decoder = find_decoder(folder, weights=False)
    started = time.process_time()
    assert run_command([f"model={name}", "plan=true", "data=python_stdlib", f"output_dir={tmp_path / 'outputs'}"]) == 0
    assert time.process_time() - started < 1
    said = capsys.readouterr().out
    layers, width, experts, n, top_k, always_on = SHAPES[name]
    assert (decoder.depth, decoder.width) == (layers, width)
    shape = f"{layers} layers of {width} neurons -> {experts} experts of {n}, {top_k} per token, and {always_on} always"
    assert shape in said
    assert re.search(r"\b(49|50)% active", said)
    (serving,) = re.findall(r"serving +(\w+): transformers", said)
    assert serving != "TinyONNForCausalLM" or decoder.model_type in {
        "ministral3",
        "lfm2",
        "gemma4_text",
        "qwen3_5_text",
    }


OPTIONS = [(group, option) for group, options in groups().items() for option in options]
NODES = {name: kind for name, kind in get_type_hints(Settings).items() if is_dataclass(kind)}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group, option):
    settings = composed(f"{group}={option}")
    assert isinstance(settings, Settings)
    assert settings.experts == settings.model.experts


def test_the_plain_command_carves_the_embedded_model():
    settings = compose([])[0]
    assert (settings.stage, settings.experts, settings.n, settings.active) == ("all", 16, 64, 0.5)
    assert (settings.top_k, settings.always_on, settings.seed, settings.fresh) == (None, None, 0, False)
    assert settings.dense_layers == []
    assert settings.output_dir == str(CONF.parent / "outputs")


@pytest.mark.parametrize("preset", ["qwen2_5_0_5b", "qwen2_5_coder_0_5b"])
def test_a_preset_of_half_a_billion_has_the_settings_of_the_measured_half(preset):
    dials, tokens, steps, shares = ROWS["half"]
    row, settings = row_settings("half", "a.jsonl", "b.jsonl"), composed(f"model={preset}")
    shape = resolve_shape(request_shape(settings, decoder_of("qwen2", num_hidden_layers=24)), 4864)
    assert (shape.experts, shape.n, shape.always_on) == (dials["experts"], dials["n"], dials["always_on"])
    assert shape.top_k == dials["top_k"] + 1  # fills half of all layers' neurons
    assert settings.dense_layers == row["dense_layers"]
    assert (settings.data.tokens, settings.data.max_length) == (tokens, row["data.max_length"])
    chats, web, encyclopedia, code = (source.share for source in settings.data.sources)
    assert (chats, web + encyclopedia, code) == pytest.approx(shares)
    project = settings.project
    assert (project.descent_steps, project.rounds, project.penalties) == (steps, 0, [1.0])
    assert project.gradient_projection  # of the default chain: validation undoes what does not help
    assert settings.score.method == "s_p"
    assert compose([f"model={preset}", "project=align"])[0].project.descent_steps == 0


@pytest.mark.parametrize("group", sorted(NODES))
def test_the_first_option_of_a_group_spells_every_setting_with_its_default(group):
    """The only option without `defaults` lists every field, so that the files alone are a reference."""
    files = {path.stem: yaml.safe_load(path.read_text()) for path in (CONF / group).glob("*.yaml")}
    (base,) = (name for name, content in files.items() if "defaults" not in content)
    assert files[base].keys() == {spec.name for spec in fields(NODES[group])}
    if group != "model":  # its base option is any hub model
        defaults = OmegaConf.to_container(OmegaConf.structured(NODES[group]))
        # Some settings of the dump are read from environment variables.
        filled = OmegaConf.merge(OmegaConf.structured(NODES[group]), OmegaConf.create(files[base]))
        assert OmegaConf.to_container(filled, resolve=True) == defaults


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_every_key_is_explained(path):
    """Every file begins with a comment, and every setting has one above it, except in experiments."""
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    if path.parent.name == "experiment":
        return
    unexplained = [line for above, line in pairwise(lines) if is_setting(line) and not above.lstrip().startswith("#")]
    assert unexplained == []


def test_the_help_page_lists_every_program_and_explains_every_setting_of_a_group():
    for name, (_module, about) in PROGRAMS.items():
        assert f"  {name:13}{about}\n" in help_page()
    for group, options in groups().items():
        page = help_page(["--help", group])
        titles = [re.match(r"\w+=(\w+)", line)[1] for line in page.splitlines() if line and line[0] != " "]
        assert titles == options
        for option in options:
            settings = yaml.safe_load((CONF / group / f"{option}.yaml").read_text()) or {}
            assert all(f"\n  {name}:" in page for name in settings if name != "defaults")
    assert "data=text, changes python_stdlib\n" in help_page(["--help", "data"])


def is_setting(line):
    return ": " in line and not line.lstrip().startswith(("#", "-"))


def test_a_short_healing_saves_checkpoints_to_resume_from():
    train = composed("train=heal").train
    steps = 200_000 // (512 * train.batch)
    assert sum(is_due(step, train.save_steps, train) for step in range(1, steps)) >= 4


@pytest.mark.parametrize("row", ROWS)
def test_the_settings_of_a_row_compose(row):
    words = [quote(name, value) for name, value in {**row_settings(row, "a b.jsonl", "c.jsonl"), **HEALING}.items()]
    assert not override_errors(words, sweep=False)
    settings, _folder = compose(["data=mixture", "train=heal", *words])
    assert settings.data.sources[0].path == "a b.jsonl"
    assert sum(source.share for source in settings.data.sources) == pytest.approx(1)
