"""dump: run the dense model on text and write the tensors of attention and of layers with weights."""

import re
from dataclasses import fields
from pathlib import Path
from time import perf_counter

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from instruments.errors import ConfigError
from instruments.tensor_dump.command import facts_of
from instruments.tensor_dump.config import DumpConfig, TensorSelection
from instruments.tensor_dump.index import Manifest
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.tensor_dump import TensorDump
from models.config import ModelConfig
from models.loading import load_dense, load_tokenizer, padding_id
from models.source import resolve_folder
from stages.artifacts.job import Job, Table
from stages.dump.config import DumpStageConfig
from stages.losses import forward_losses, gradients_from_embeddings, save_memory
from stages.text.batches import TokenBatch, batch_sequences
from stages.text.config import DataConfig
from stages.text.sequences import load_text


def summarise(folder: Path, manifest: Manifest, *, seconds: float) -> Table:
    """The result table; its notes name missing or suspicious records."""
    reader = DumpReader(folder)
    _folder, *facts = facts_of(reader)
    rows = [*facts, ("time", f"{seconds:.1f} s")]
    return Table("Tensors dumped", ("what", "value"), rows, list(manifest.complaints()))


def run(job: Job, *, model: ModelConfig, data: DataConfig, dump: DumpStageConfig) -> Table:
    """Write a dump of the first batches into `out`."""
    folder = resolve_folder(model)
    tokenizer = load_tokenizer(folder, trust_remote_code=model.trust_remote_code)
    text = load_text(data, tokenizer, "calibration")
    batches = batch_sequences(text.sequences, dump.batch_tokens, padding_id(tokenizer))[: dump.steps]
    dense = load_dense(model, folder)
    if dump.gradients:
        save_memory(dense, asked=dump.gradient_checkpointing)
    started = perf_counter()
    # The embedding hook comes before the dump, so that the dump sees embeddings with a gradient.
    with gradients_from_embeddings(dense), make_dump(dense, job, dump, model.label) as dumped:
        for batch in tqdm(batches, desc="dump", unit="step"):
            dumped.step(read_batch(dense, batch, gradients=dump.gradients))
    assert dumped.manifest is not None
    return summarise(job.out, dumped.manifest, seconds=perf_counter() - started)


def make_dump(dense: PreTrainedModel, job: Job, dump: DumpStageConfig, label: str) -> TensorDump:
    """Open the dump. Raises ConfigError, with the names of this stage's settings."""
    config = DumpConfig(**{one.name: getattr(dump, one.name) for one in fields(TensorSelection)})
    try:
        return TensorDump(dense, job.out, config, metadata={"model": label}, environment={})
    except ConfigError as error:
        what, do = (re.sub(r"\b(modules|tensors)=", r"dump.\1=", text) for text in (error.what, error.do))
        raise ConfigError(what, where=error.where.replace("setting ", "setting dump."), do=do) from error


def read_batch(dense: PreTrainedModel, batch: TokenBatch, *, gradients: bool) -> float:
    """One pass; gradients are of the sum of the samples' mean losses. Returns this sum."""
    with torch.set_grad_enabled(gradients):
        losses_B = forward_losses(dense, batch)
    if gradients:
        losses_B.sum().backward()  # type: ignore[no-untyped-call]
    return float(losses_B.detach().sum())
