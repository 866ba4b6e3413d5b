"""Something to read: the beginnings of held-out documents, continued greedily by the dense and the carved model."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from instruments.errors import DataError
from models.loading import is_offloaded, padding_id
from stages.text.config import DataConfig, Source
from stages.text.documents import Document
from stages.text.generated import decode_behind, encode_start, find_ends, write_continuations
from stages.text.sources import read_sources

TOKENS = 32  # of the beginning of plain text, and of its continuation
TRIED = 1000  # documents of a source: where all prompts are too long, it would be read to its end


@dataclass(frozen=True)
class Sample:
    """One prompt, and what each model writes after it."""

    prompt: str
    dense: str
    carved: str

    @property
    def note(self) -> str:
        """Three lines of the terminal; line ends and control characters of the text are escaped."""
        said = {"prompt": self.prompt, "dense": self.dense, "MoE": self.carved}
        return "\n".join(f"{who:<7} {json.dumps(text, ensure_ascii=False)}" for who, text in said.items())


def write_samples(
    models: Mapping[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase, data: DataConfig, count: int
) -> list[Sample]:
    """Continue the first `count` held-out documents of all sources in turn, greedily; deterministic.

    A conversation is continued at its last answer. Empty if a model cannot generate, or its weights are read again for
    every token.
    """
    if not count or any(is_offloaded(model) or not model.can_generate() for model in models.values()):
        return []
    known = min(model.get_input_embeddings().num_embeddings for model in models.values())
    tokens, pad_id = min(TOKENS, data.max_length // 2), padding_id(tokenizer)
    starts = (
        islice(_starts(source, documents, tokenizer, tokens, known), count)
        for source, documents in read_sources(data, "heldout")
    )
    prompts = list(islice(filter(None, chain.from_iterable(zip_longest(*starts))), count))
    if not prompts:
        return []
    wanted = DataConfig(max_new_tokens=tokens)
    written = {
        name: write_continuations(model, prompts, wanted, find_ends(model, tokenizer), pad_id, seed=0)
        for name, model in models.items()
    }
    begun = [tokenizer.decode(ids, skip_special_tokens=True) for ids in prompts]
    texts = [[decode_behind(tokenizer, *pair) for pair in zip(prompts, part, strict=True)] for part in written.values()]
    return [Sample(*sample) for sample in zip(begun, *texts, strict=True)]


def _starts(
    source: Source, documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, tokens: int, known: int
) -> Iterator[Sequence[int]]:
    """Prompts that leave room for `tokens` more, and whose ids all have an embedding."""
    short = replace(source, prompt_tokens=tokens)
    with suppress(DataError):  # of a record behind the measured text: the evaluation is worth more than its samples
        for document in islice(documents, TRIED):
            ids = encode_start(document, tokenizer, short)
            if 0 < len(ids) <= source.max_length - tokens and max(ids) < known:
                yield ids
