"""Every file under conf/ composes and is documented; the base options list the whole schema."""

import re
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import get_type_hints

import hydra
import pytest
import yaml
from config.preset_sizes import CONFIGS
from omegaconf import OmegaConf
from pico import decoder_of

from models.config import MoEShape
from pipeline.check import request_shape
from pipeline.help import CONF, groups, help_page, summary
from pipeline.settings import Settings, register_schema, to_settings
from pipeline.shape import resolve_shape

OPTIONS = [(group, option) for group, options in groups().items() for option in options]
NODES = {name: kind for name, kind in get_type_hints(Settings).items() if is_dataclass(kind)}


def compose(*overrides):
    register_schema()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(overrides))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group, option):
    settings = to_settings(compose(f"{group}={option}"))
    assert isinstance(settings, Settings)
    assert group == "experiment" or settings.experts == settings.model.experts


def test_the_plain_command_carves_the_embedded_model():
    settings = to_settings(compose())
    assert (settings.stage, settings.experts, settings.n, settings.active) == ("all", 16, 64, 0.5)
    assert (settings.top_k, settings.always_on, settings.seed, settings.fresh) == (None, None, 0, False)
    assert settings.dense_layers == []
    assert settings.output_dir == str(CONF.parent / "outputs")


@pytest.mark.parametrize("preset", [*sorted(CONFIGS), "hub", "local"])
def test_the_shape_of_a_real_model_follows_from_its_width(preset):
    settings = to_settings(compose(f"model={preset}"))
    assert (settings.experts, settings.n, settings.top_k, settings.always_on) == (None, None, None, None)
    assert settings.model.trust_remote_code is False
    typed = to_settings(compose(f"model={preset}", "experts=100", "n=256"))
    assert (typed.experts, typed.n) == (100, 256)


@pytest.mark.parametrize("preset", sorted(CONFIGS))
def test_the_shape_that_a_preset_names_is_the_one_it_gets(preset):
    """The preset's first line names layers, F, E, N, K, S: E·N + S = F, with about a quarter always on."""
    line = (CONF / "model" / f"{preset}.yaml").read_text().splitlines()[0]
    layers, width, experts, n, top_k, always_on = map(int, re.findall(r" (\d+)(?=,| [a-z])", line))
    settings = to_settings(compose(f"model={preset}"))
    request = request_shape(settings, replace(decoder_of("qwen2"), depth=layers))
    dense = tuple(sorted(layer % layers for layer in settings.model.dense_layers))
    assert resolve_shape(request, width) == MoEShape(experts, n, top_k, always_on, dense_layers=dense)
    assert experts * n + always_on == width
    assert always_on % 64 == 0
    assert 0.23 < always_on / width <= 0.25


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


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_the_line_of_an_option_on_the_help_page_is_whole(group, option):
    assert re.search(r"[.?]$|=\S+$", summary(CONF / group / f"{option}.yaml"))


def test_the_help_page_shows_values_not_what_they_are_filled_from():
    assert "${" not in help_page()


def is_setting(line):
    return ": " in line and not line.lstrip().startswith(("#", "-"))


def test_experiments_are_global_overlays():
    for name in ("experiment", "debug"):
        for path in (CONF / name).glob("*.yaml"):
            assert path.read_text().startswith("# @package _global_\n# ")


def test_controls_are_all_chance():
    settings = to_settings(compose("experiment=controls"))
    assert (settings.score.method, settings.cluster.method, settings.assemble.router) == ("random", "random", "random")
