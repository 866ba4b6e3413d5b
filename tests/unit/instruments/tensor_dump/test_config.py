"""Settings of a dump, as arguments and from the environment."""

import pytest
from unit.instruments.tensor_dump.small_model import Small

from instruments.errors import ConfigError
from instruments.tensor_dump.config import DumpConfig, read_settings
from instruments.tensor_dump.tensor_dump import TensorDump


@pytest.mark.parametrize(
    ("settings", "environment", "setting"),
    [
        ({"modules": ["*.q_proj", "layers.0"]}, {}, "modules"),
        ({"tensors": ["query"]}, {}, "tensors"),
        ({}, {"CUSTOM_QUANT_TYPE": "fp3"}, "CUSTOM_QUANT_TYPE"),
        ({"quant_type": "int4"}, {}, "quant_type"),
        ({}, {"TENSOR_SAVE_ENABLED": "maybe"}, "TENSOR_SAVE_ENABLED"),
        ({"keep": "everything"}, {}, "keep"),
        ({"every_steps": 0}, {}, "every_steps"),
    ],
)
def test_settings_without_meaning_are_errors(tmp_path, settings, environment, setting):
    with pytest.raises(ConfigError) as error:
        TensorDump(Small(), tmp_path / "dump", DumpConfig(**settings), environment=environment)
    assert setting in error.value.where
    assert error.value.do
    assert not (tmp_path / "dump").exists()


def test_no_folder():
    with pytest.raises(ConfigError, match="no folder to dump into"):
        TensorDump(Small(), environment={})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('{"steps": 3}', "there is no setting steps"),
        ("max_steps=2", "Expecting value"),
        ('{"max_steps": "2"}', "max_steps missing or of another type"),
    ],
)
def test_settings_in_the_environment(settings, message):
    assert read_settings({"TENSOR_SAVE_CONFIG": '{"max_steps": 2}'}) == DumpConfig(max_steps=2)
    with pytest.raises(ConfigError, match=message):
        read_settings({"TENSOR_SAVE_CONFIG": settings})
