"""A checkpoint that writes: dense or carved, loaded from its folder, and continued greedily in batches."""

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import StopStringCriteria

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from instruments.cpu import has_amx
from instruments.device import free_device_memory, is_launch_bound
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
from stages.text.batches import TokenSequence, group_lengths
from stages.text.check import longest_sequence
from stages.text.config import DataConfig, Source
from stages.text.documents import Document
from stages.text.generated import decode_behind, encode_start, find_ends, write_continuations
from stages.text.sequences import require_embeddings
from stages.text.template import find_chat

# Tokens that a CPU writes at a time (a quarter of them: half as fast); bytes of a GPU's cache of keys and values: there
# hundreds of answers take no more time than one. At most this part of the free bytes: reading the prompts takes more.
AT_ONCE, CACHE, CACHE_PART = 16384, 2**32, 8
# Text, its tokens, and whether it ended before the limit.
Written = tuple[str, int, bool]


@dataclass(frozen=True)
class Writer:
    """A model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    special: bool = False  # whether its texts keep special tokens, such as that of a tool call, but for the end token

    def encode(self, prompt: str, *, chat: bool, opened: str = "") -> list[int]:
        """Token ids of plain text, or of a user's message in the chat template and the beginning of its answer.

        Raises ConfigError: the prompt is empty, or not UTF-8; CheckpointError: the tokenizer has no chat template;
        DataError: the model has no embedding for a token.
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
        messages = ({"role": "user", "content": prompt},)
        document = Document("prompt", messages=messages) if chat else Document("prompt", prompt)
        return self._encode(document, opened)

    def _encode(self, document: Document, opened: str = "") -> list[int]:
        ids = encode_start(document, self.tokenizer, Source(prompt_tokens=sys.maxsize), opened)
        require_embeddings([TokenSequence(document.name, ids, ids)] if ids else [], self.tokenizer)
        return ids

    def require_template(self) -> None:
        """Raise CheckpointError if the tokenizer has no chat template."""
        if not self.tokenizer.chat_template:
            do = "an instruction-tuned model; generate without --chat continues plain text"
            raise CheckpointError("the tokenizer has no chat template", where=self.tokenizer.name_or_path, do=do)

    def encode_question(self, conversation: Document) -> list[int]:
        """Token ids of a conversation, and of the beginning of its next answer; [] if template or model refuse it."""
        try:
            return self._encode(conversation)
        except DataError:
            return []

    def join(self, question: Document, said: str) -> Document | None:
        """The conversation with this answer; None if the chat template writes it otherwise than the model did.

        Such as without its thought. White space may differ.
        """
        answered = replace(question, messages=(*question.messages, {"role": "assistant", "content": said}))
        chat = find_chat(self.tokenizer, Source(), tools=bool(question.tools))
        try:
            whole, asked = chat.write(answered), chat.write(question, opened=True)
        except DataError:
            return None
        return answered if "".join(whole.split()).startswith("".join((asked + said).split())) else None

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
        if not is_launch_bound(device := input_device(self.model)):
            return AT_ONCE
        free = free_device_memory(device)
        cache = CACHE if free is None else min(CACHE, free // CACHE_PART)
        config = self.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(cache // (2 * config.num_hidden_layers * heads * width * self.model.dtype.itemsize))

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
        said = row[:-1] if row and row[-1] in ends else row
        text = decode_behind(self.tokenizer, prompt, said, special=self.special)
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
    try:
        place = resolve_device(model)
    except ConfigError as error:
        raise ConfigError(error.what, where="--device", do="--device auto, or --device cpu") from error
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
