"""The monitor of gradients and outputs, from the start of a phase to its end."""

import logging
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from models.errors import ConfigError
from models.numerics.watch.anomalies import NOTE
from models.numerics.watch.config import WatchConfig
from models.numerics.watch.model_watch import ModelWatch, watch_model
from stages.train.config import TrainWatchConfig
from stages.train.phases import Phase
from stages.train.record import Record

if TYPE_CHECKING:
    from stages.train.trainer import MoETrainer

logger = logging.getLogger(__name__)


class Monitor(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Watches the model as it is trained, wrapped for its processes."""

    trainer: "MoETrainer"

    def __init__(self, settings: TrainWatchConfig, phase: Phase, record: Record | None) -> None:
        """`record` is None in processes that do not lead."""
        self.settings, self.phase, self.record = settings, phase, record
        self._watch: ModelWatch | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - the signature of Trainer
        """Put the hooks on."""
        asked = self.settings
        if not asked.enabled:
            return
        limits = WatchConfig(
            vanishing=asked.vanishing, exploding=asked.exploding, dead=asked.dead, activations=asked.outputs
        )
        try:
            self._watch = watch_model(self.trainer.model_wrapped, config=limits)
        except ConfigError as error:
            logger.warning("training goes on unwatched: %s; train.watch.enabled=false says so", error.what)

    def look(self, step: int) -> None:
        """Gradients are whole, unscaled and not yet clipped."""
        if self._watch is None:
            return
        self._watch.next_step = step
        found = [anomaly for anomaly in self._watch.step().anomalies if anomaly.severity != NOTE]
        if found and self.record is not None:
            self.record.warn(step, self.phase.name, [anomaly.message for anomaly in found])

    def on_train_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Take them off."""
        if self._watch is not None:
            self._watch.remove()
