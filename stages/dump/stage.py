"""dump: the dense model reads some text, and what its attention and Linear layers compute is written."""

import logging
import os
import re
from time import perf_counter

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from models.config import ModelConfig
from models.dump.environment import ENABLED, FOLDER, QUANT_TYPE
from models.dump.tensor_dump import TensorDump
from models.errors import ConfigError
from models.loading import load_dense, load_tokenizer
from models.source import resolve_folder
from stages.calibration.forward import forward_losses
from stages.calibration.recomputation import save_memory
from stages.contracts.job import Job, Table
from stages.data.batches import TokenBatch, batch_sequences
from stages.data.config import DataConfig
from stages.data.sequences import load_text
from stages.dump.config import DumpStageConfig
from stages.dump.summary import summarise

logger = logging.getLogger(__name__)


def run(job: Job, *, model: ModelConfig, data: DataConfig, dump: DumpStageConfig) -> Table:
    """Write a dump of the first batches into `out`."""
    warn_of_environment()
    folder = resolve_folder(model)
    tokenizer = load_tokenizer(folder)
    text = load_text(data, tokenizer, "calibration")
    batches = batch_sequences(text.sequences, dump.batch_tokens, tokenizer.pad_token_id or 0)[: dump.steps]
    dense = load_dense(model, folder)
    if dump.gradients:
        save_memory(dense, asked=dump.gradient_checkpointing)
    started = perf_counter()
    with make_dump(dense, job, dump, model.label) as dumped:
        for batch in tqdm(batches, desc="dump", unit="step"):
            dumped.step(read_batch(dense, batch, gradients=dump.gradients))
    assert dumped.manifest is not None
    return summarise(job.out, dumped.manifest, dump, seconds=perf_counter() - started)


def make_dump(dense: PreTrainedModel, job: Job, dump: DumpStageConfig, label: str) -> TensorDump:
    """The dump, its errors in the words of this stage's settings. Raises ConfigError."""
    try:
        return TensorDump(dense, job.out, dump, metadata={"model": label}, environment={})
    except ConfigError as error:
        what, do = (re.sub(r"\b(modules|tensors)=", r"dump.\1=", text) for text in (error.what, error.do))
        raise ConfigError(what, where=error.where.replace("setting ", "setting dump."), do=do) from error


def read_batch(dense: PreTrainedModel, batch: TokenBatch, *, gradients: bool) -> float:
    """One pass; every sample's loss is its own mean, and the sum of all is what gradients are of."""
    with torch.set_grad_enabled(gradients):
        losses_B = forward_losses(dense, batch)
    if gradients:
        losses_B.sum().backward()  # type: ignore[no-untyped-call]
    return float(losses_B.detach().sum())


def warn_of_environment() -> None:
    """The variables are for loops of one's own: results of a stage depend on its settings alone."""
    settings = {ENABLED: "stage=", FOLDER: "output_dir=", QUANT_TYPE: "dump.quant_type="}
    for variable, setting in settings.items():
        if os.environ.get(variable):
            logger.warning("environment variable %s is ignored by stage=dump: use %s", variable, setting)
