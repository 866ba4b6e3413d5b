"""The text of a training: that of the carve's calibration, or the dense model's own answers to it."""

from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from instruments.cpu import has_amx
from instruments.device import is_launch_bound
from models.config import ModelConfig
from models.loading import input_device, load_dense, padding_id
from models.source import read_config
from models.targets.config_json import source_dtype
from stages.artifacts.job import Job
from stages.text.batches import TokenBatch, batch_sequences
from stages.text.config import DataConfig, Source, list_sources
from stages.text.generated import generate_text
from stages.text.sequences import LoadedText, find_begin, load_text, mix, pack_documents, select_usable
from stages.text.sources import read_documents
from stages.train.config import TrainConfig

# Tokens that a CPU writes at a time (a quarter of them: half as fast); bytes of a GPU's cache of keys and values: there
# hundreds of answers take no more time than one.
AT_ONCE, CACHE = 16384, 2**32


@dataclass(frozen=True)
class TrainingText:
    """Training sequences, and held-out batches."""

    train: LoadedText
    heldout: list[TokenBatch]
    pad_id: int


def read_text(
    job: Job,
    model: ModelConfig,
    folder: Path,
    data: DataConfig,
    train: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> TrainingText:
    """Read up to `train.tokens` of the calibration split, and the first sequences of the held-out split.

    With `train.own_answers` the dense model, `model` in `folder`, writes the answers of conversations, packed as other
    text is; the sources of a mixture without any stay as they are. Without conversations it continues plain text.
    """
    wanted, pad_id = replace(data, tokens=train.tokens), padding_id(tokenizer)
    if train.own_answers:
        text = _answer(job, model, folder, wanted, train.own_answers, tokenizer, seed)
    else:
        text = load_text(wanted, tokenizer, "calibration")
    heldout = load_text(data, tokenizer, "heldout").sequences[: train.heldout_sequences]
    return TrainingText(text, batch_sequences(heldout, train.micro_batch * data.max_length, pad_id), pad_id)


def _answer(
    job: Job,
    model: ModelConfig,
    folder: Path,
    data: DataConfig,
    longest: int,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> LoadedText:
    if data.labels != "generated":  # then the other settings of generated text are not read, nor in the fingerprint
        plain = DataConfig()
        data = replace(data, temperature=plain.temperature, prompt_tokens=plain.prompt_tokens)
    if has_amx() and model.dtype == "auto" and source_dtype(read_config(folder)) == "bfloat16":
        model = replace(model, dtype="bfloat16")  # a CPU then writes three times as fast
    load = cache(lambda: load_dense(model, folder))
    first = [next(read_documents(source), None) for source in list_sources(data, "calibration")]
    talking = [document is not None and bool(document.messages) for document in first]
    parts: list[tuple[Source, LoadedText]] = []
    for source, talks in zip(list_sources(data, "calibration"), talking, strict=True):
        alone = replace(source, heldout_path=data.heldout_path, max_new_tokens=longest)
        if talks or not any(talking):
            at_once, kept = partial(_at_once, wanted=alone), job.scratch / source.place
            kept.mkdir(parents=True, exist_ok=True)
            text = generate_text(load, tokenizer, alone, kept, seed=seed, at_once=at_once, workers=job.workers)
            if source.packing == "packed":
                whole = pack_documents(text.sequences, source.max_length, find_begin(tokenizer))
                text = replace(text, sequences=select_usable(whole, source.tokens).sequences)
        else:
            text = load_text(alone, tokenizer, "calibration")
        parts.append((source, text))
    return parts[0][1] if len(parts) == 1 else mix(parts)


def _at_once(dense: PreTrainedModel, wanted: DataConfig) -> int:
    """Tokens that the dense model writes at a time, prompts included."""
    if not is_launch_bound(input_device(dense)):
        return max(AT_ONCE, wanted.max_length)
    config = dense.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fitting: int = CACHE // (2 * config.num_hidden_layers * heads * width * dense.dtype.itemsize)
    return max(min(fitting, wanted.tokens), wanted.max_length)
