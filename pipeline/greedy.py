"""A checkpoint that writes: dense or carved, loaded from its folder, and continued greedily in batches."""

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import StopStringCriteria

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from instruments.cpu import has_amx
from instruments.device import is_launch_bound
from instruments.errors import CheckpointError, ConfigError, DataError
from models.config import ModelConfig
from models.loading import (
    explained_memory,
    input_device,
    load_tokenizer,
    load_whole,
    padding_id,
    placement,
    resolve_device,
    resolve_dtype,
)
from models.training import LARGE_PRODUCTS
from stages.text.batches import group_lengths
from stages.text.chat import encode_conversation, encode_prompt
from stages.text.check import longest_sequence
from stages.text.config import DataConfig, Source
from stages.text.documents import Document
from stages.text.generated import decode_behind, encode_start, find_ends, write_continuations

# Tokens that a CPU writes at a time (a quarter of them: half as fast); bytes of a GPU's cache of keys and values: there
# hundreds of answers take no more time than one.
AT_ONCE, CACHE = 16384, 2**32
# Text, its tokens, and whether it ended before the limit.
Written = tuple[str, int, bool]


@dataclass(frozen=True)
class Writer:
    """A model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def encode(self, prompt: str, *, chat: bool, opened: str = "") -> list[int]:
        """Token ids of plain text, or of a user's message in the chat template and the beginning of its answer.

        Raises ConfigError: the prompt is empty, or not UTF-8; CheckpointError: the tokenizer has no chat template.
        """
        fault = "" if prompt.strip() else "the prompt is empty"
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # from a terminal of another encoding
            fault = f"the prompt is not UTF-8: {error}"
        if fault:
            raise ConfigError(fault, where="command line", do='a prompt such as "def carve("')
        if chat:
            self.require_template()
        document = Document("prompt", messages=({"role": "user", "content": prompt},)) if chat else Document("", prompt)
        return encode_start(document, self.tokenizer, Source(prompt_tokens=sys.maxsize), opened)

    def require_template(self) -> None:
        """Raise CheckpointError if the tokenizer has no chat template."""
        if not self.tokenizer.chat_template:
            do = "an instruction-tuned model, or generate without --chat"
            raise CheckpointError("the tokenizer has no chat template", where=self.tokenizer.name_or_path, do=do)

    def encode_question(self, conversation: Document) -> list[int]:
        """Token ids of a conversation, and of the beginning of its next answer; [] if the template refuses it."""
        try:
            return encode_prompt(conversation, self.tokenizer, Source())
        except DataError:
            return []

    def reads(self, conversation: Document) -> bool:
        """Whether the chat template renders a conversation as text for a carve."""
        try:
            return bool(encode_conversation(conversation, self.tokenizer, Source()))
        except DataError:
            return False

    @property
    def longest(self) -> int:
        """Tokens of the longest text that the model reads."""
        return longest_sequence(self.model.config.get_text_config(decoder=True).to_dict()) or sys.maxsize

    def write_all(
        self, prompts: Sequence[Sequence[int]], tokens: int, stop: str = ""
    ) -> Iterator[tuple[range, list[Written]]]:
        """Continue prompts in batches that suit the device; yields the numbers of a batch's prompts, and `write`'s."""
        lengths = [len(prompt) + tokens for prompt in prompts]
        for batch in group_lengths(lengths, self._tokens_at_once()):
            yield batch, self.write(prompts[batch.start : batch.stop], tokens, stop)

    def _tokens_at_once(self) -> int:
        if not is_launch_bound(input_device(self.model)):
            return AT_ONCE
        config = self.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(CACHE // (2 * config.num_hidden_layers * heads * width * self.model.dtype.itemsize))

    def write(self, prompts: Sequence[Sequence[int]], tokens: int, stop: str = "") -> list[Written]:
        """Continue a batch of prompts greedily, without the checkpoint's penalties, by at most `tokens` each.

        Returns:
            For each the text, its number of tokens, and whether it ended, by the end token or `stop`, before the limit.
        """
        ends, data = find_ends(self.model, self.tokenizer), DataConfig(max_new_tokens=tokens)
        pad_id, criteria = padding_id(self.tokenizer), [StopStringCriteria(self.tokenizer, [stop])] if stop else []
        with explained_memory("generation", "fewer tokens, or --device cpu"):
            rows = write_continuations(self.model, prompts, data, ends, pad_id, seed=0, criteria=criteria)
        return [self._read(prompt, row, ends, stop) for prompt, row in zip(prompts, rows, strict=True)]

    def _read(self, prompt: Sequence[int], row: Sequence[int], ends: Collection[int], stop: str) -> Written:
        text = decode_behind(self.tokenizer, prompt, row)
        if stop and stop in text:  # padding follows
            text = text.partition(stop)[0] + stop
            return text, len(self.tokenizer(text, add_special_tokens=False)["input_ids"]), True
        return text, len(row), not row or row[-1] in ends


@contextmanager
def open_writer(folder: Path, device: str = "auto", *, exact: bool = False) -> Iterator[Writer]:
    """Load a checkpoint with transformers. Raises UserError.

    auto: on GPUs one after the other, then in memory, as far as the weights need; in fp32 on a CPU without AMX, or if
    `exact`, else as stored.
    """
    model = ModelConfig(kind="local", path=str(folder), device=device, dtype="float32" if exact else "auto")
    place = resolve_device(model)
    if device == "auto" and place.type != "cpu":
        model.device_map = "sequential"
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    with TemporaryDirectory() as offloaded:
        with explained_memory(f"loading {folder}", "--device cpu, or more memory"):
            where = placement(model, place) | {"offload_folder": offloaded}
            dtype = None if has_amx() and not exact else resolve_dtype(model, place)
            # On a GPU transformers' own: it decodes with batched_mm, but only in place of its default.
            kernels = {"experts_implementation": LARGE_PRODUCTS} if place.type == "cpu" else {}
            loaded = load_whole(folder, dtype=dtype or "auto", **kernels, **where)
        with explained_memory(f"running {folder}", "--device cpu, or more memory"):
            yield Writer(loaded, tokenizer)
