"""Settings out of the files under conf/ and the words of a command line."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from models.errors import ConfigError
from pipeline.layout import CONF
from pipeline.schema import Settings, to_settings


def compose(words: Sequence[str]) -> tuple[Settings, Path]:
    """The settings that the words select, and the folder for the record of this run.

    Raises:
        ConfigError: the files contradict the schema or each other.
    """
    with composition_errors():
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            config = hydra.compose("config", list(words), return_hydra_config=True)
        folder = Path(config.hydra.run.dir)
        with open_dict(config):
            del config["hydra"]
        return to_settings(config), folder


def run_hydra(task: Callable[[Settings, Path, Sequence[str]], None]) -> None:
    """Let Hydra read the command line (sweeps with `-m`, `--cfg job`, `--info`) and do the task for each job.

    Raises:
        ConfigError: the files contradict the schema or each other.
        UserError: a job failed; all others were still done.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come back to the caller instead of ending the process

    @hydra.main(str(CONF), "config", version_base="1.3")
    def main(config: DictConfig) -> None:
        job = HydraConfig.get()
        task(to_settings(config), Path(job.runtime.output_dir), job.overrides.task)

    with composition_errors():
        main()


@contextmanager
def composition_errors() -> Iterator[None]:
    """Turn what Hydra and OmegaConf say about the files under conf/ into a ConfigError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(
            " ".join(str(error).strip().splitlines()[:2]),  # what Hydra was doing, and what was wrong
            where=f"the files under {CONF} and the command line",
            do="python -m pipeline --help lists settings and options",
        ) from error
