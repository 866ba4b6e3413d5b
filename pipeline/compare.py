"""`python -m pipeline compare DENSE CHECKPOINT ... --text FILE`: losses of checkpoints, wherever they were trained."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from instruments.errors import ConfigError, DataError, exit_code, say
from models.source import read_config
from models.targets.config import text_of
from pipeline.generate import add_limits, count
from stages.artifacts.rendering import show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stages.losses import MeanLoss
    from stages.text.batches import TokenSequence

COLUMNS = ("model", "perplexity", "loss gap (nats)", "±", "KL", "same token")
LENGTH = 512


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a checkpoint or the text cannot be read, 2 wrong command line or another vocabulary."""
    told = "Compare the losses of checkpoints, carved or trained anywhere, with the dense model's on a text."
    parser = argparse.ArgumentParser(prog="python -m pipeline compare", description=told)
    parser.add_argument("dense", type=Path, metavar="DENSE", help="folder of the dense model")
    parser.add_argument(
        "checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help="folders of others of its vocabulary"
    )
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="text, or a folder of it")
    told = f"longest sequence, in tokens; default {LENGTH}"
    parser.add_argument("--length", type=count, default=LENGTH, metavar="N", help=told)
    add_limits(parser, tokens=8192)
    wanted = parser.parse_args(words)

    def work() -> None:
        folders = [wanted.dense, *wanted.checkpoints]
        for folder in folders:
            read_config(folder)
        say(render(folders, measure(folders, wanted.text, wanted.tokens, wanted.length, wanted.device)))

    return exit_code(work)


def measure(folders: Sequence[Path], text: Path, tokens: int, length: int, device: str) -> list["MeanLoss"]:
    """Losses of every checkpoint, and its KL from the first, on the beginning of a text; all tokens count.

    Raises UserError: one cannot be read, or has another vocabulary than the first.
    """
    from models.loading import load_tokenizer, padding_id, vocabulary_size  # noqa: PLC0415 - slow, as are the others
    from pipeline.greedy import open_writer  # noqa: PLC0415
    from stages.losses import measure_losses  # noqa: PLC0415
    from stages.text.batches import batch_sequences  # noqa: PLC0415
    from stages.text.check import longest_sequence  # noqa: PLC0415

    longest = longest_sequence(text_of(read_config(folders[0])))
    if longest is not None and length > longest:
        what = f"sequences of {length} tokens are longer than the dense model's longest, {longest}"
        raise ConfigError(what, where="--length", do=f"--length {longest}")
    tokenizer, *others = (load_tokenizer(folder, trust_remote_code=False) for folder in folders)
    size, *sizes = map(vocabulary_size, (tokenizer, *others))  # None: config.json does not state it, as that of Gemma 3
    sequences = read_text(text, tokenizer, tokens, length)
    ids = sorted({id_ for sequence in sequences for id_ in sequence.ids})
    named = tokenizer.convert_ids_to_tokens(ids)
    for folder, other, embedded in zip(folders[1:], others, sizes, strict=True):
        if len({embedded, size} - {None}) > 1 or other.convert_tokens_to_ids(named) != ids:
            what = f"its tokens are not those of {folders[0]}; embeddings: {embedded}, there {size}"
            raise ConfigError(what, where=str(folder), do="a checkpoint with the dense model's vocabulary")
    batches, found = batch_sequences(sequences, max(2048, length), padding_id(tokenizer)), []
    with open_writer(folders[0], device, exact=True) as dense:
        for folder in folders[1:]:
            with open_writer(folder, device, exact=True) as other:
                both = measure_losses({"dense": dense.model, "other": other.model}, batches)
            found.append(both["other"])
    return [both["dense"], *found]


def read_text(text: Path, tokenizer: "PreTrainedTokenizerBase", tokens: int, length: int) -> list["TokenSequence"]:
    """The beginning of a text file or folder, in sequences of at most `length` tokens. Raises DataError."""
    from stages.text.config import DataConfig  # noqa: PLC0415
    from stages.text.sequences import load_text  # noqa: PLC0415

    data = DataConfig(heldout_path=str(text), heldout_tokens=tokens, max_length=length)
    with explained_text(text):
        return load_text(data, tokenizer, "heldout").sequences


@contextmanager
def explained_text(text: Path) -> Iterator[None]:
    """Errors of reading a text name the option, not a setting; at the end, files of a folder that are not read."""
    from stages.text.config import Source  # noqa: PLC0415
    from stages.text.files import describe_files  # noqa: PLC0415

    try:
        yield
        if files := describe_files(Source(kind="text", path=str(text))):
            say(f"{text}{files}\n")
    except DataError as error:
        where = f"--text {text}; {error.where}"  # the file and the line
        do = "correct it, or name a file or a folder of text" if "data." in error.do else error.do
        raise DataError(error.what, where=where, do=do) from error


def render(folders: Sequence[Path], losses: Sequence["MeanLoss"]) -> str:
    """The table, one row for each checkpoint."""
    dense, rows = losses[0], []
    for folder, loss in zip(folders, losses, strict=True):
        error = None if loss is dense else loss.gap_error(dense)
        figures = [show(error, ".4f"), show(loss.divergence, ".4f"), show(loss.agreement, ".1%")]
        rows.append([folder, f"{loss.perplexity:.3f}", f"{loss.nats - dense.nats:+.4f}", *figures])
    return (
        f"{tabulate(rows, COLUMNS, tablefmt='github', disable_numparse=True)}\n\n"
        f"{dense.tokens:,} tokens in {len(dense.sequences)} sequences; ±: standard error of the gap over sequences; "
        "KL: KL(dense ‖ model) per token, nats; same token: where both find the same token most likely\n"
    )
