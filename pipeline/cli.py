"""The command `python -m pipeline`: from words to a run, and from errors to exit codes."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from models.errors import ConfigError, UserError
from pipeline.disk import explain_os_error
from pipeline.layout import CONF
from pipeline.overrides import override_errors
from pipeline.plan import make_plan
from pipeline.run_folder import RunFolder
from pipeline.runner import Runner
from pipeline.schema import register_schema, to_settings
from pipeline.validation import InvalidSettingsError, validate

FAILED, INVALID, INTERRUPTED = 1, 2, 130


def run_command(words: Sequence[str]) -> int:
    """Do what the command line says; returns the exit code.

    0 done, 1 a stage failed, 2 the settings are wrong (nothing was started), 130 interrupted.
    """
    try:
        start(words)
    except KeyboardInterrupt:
        return INTERRUPTED
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return INVALID if isinstance(error, ConfigError) else FAILED
    return 0


def start(words: Sequence[str]) -> None:
    """Check the words, then compose and carve; words with a flag, such as `--multirun`, go through Hydra's own front.

    Raises:
        UserError: the settings are wrong, or a stage failed.
    """
    register_schema()
    flags = [word for word in words if word.startswith("-")]
    errors = override_errors(words, sweep=bool({"-m", "--multirun"} & set(flags)))
    if errors:
        raise InvalidSettingsError(errors)
    with composition_errors():
        if flags:
            start_hydra()
            return
        config, folder = compose(words)
    carve(config, folder, words)


@contextmanager
def composition_errors() -> Iterator[None]:
    """Turn what Hydra and OmegaConf say about the files under conf/ into a ConfigError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(
            str(error).strip().splitlines()[0],
            where=f"the files under {CONF} and the command line",
            do="python -m pipeline --help lists settings and options",
        ) from error


def compose(words: Sequence[str]) -> tuple[DictConfig, Path]:
    """The configuration that the words select, and the folder of this run's record."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose("config", list(words), return_hydra_config=True)
    folder = Path(config.hydra.run.dir)
    with open_dict(config):
        del config["hydra"]
    return config, folder


def start_hydra() -> None:
    """Let Hydra read the command line: sweeps (`-m`), `--cfg job`, `--info`, tab completion."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come back to `run_command` instead of ending the process

    @hydra.main(str(CONF), "config", version_base="1.3")
    def main(config: DictConfig) -> None:
        job = HydraConfig.get()
        carve(config, Path(job.runtime.output_dir), job.overrides.task)

    main()


def carve(config: DictConfig, folder: Path, overrides: Sequence[str]) -> None:
    """Validate everything, then run what is due, keeping the record in `folder`.

    Raises:
        UserError: the settings are wrong, or a stage failed.
    """
    settings = to_settings(config)
    steps = make_plan(validate(settings))
    try:
        run_folder = RunFolder(folder, settings, overrides)
    except OSError as error:
        raise explain_os_error(error, where="start of the run", folder=folder) or error from error
    with run_folder.logging():
        Runner(run_folder, overrides).run(steps)
