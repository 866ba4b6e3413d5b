"""Token sequences, and padded batches of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.device import send

# Label of tokens that do not count in the loss, as in torch.nn.functional.cross_entropy.
IGNORED = -100


@dataclass(frozen=True)
class TokenSequence:
    """One sequence of tokens.

    `labels[t]` is `ids[t]` if the token counts in the loss, else -100. Labels are not shifted: position t is predicted
    from the tokens before it, so that the label of position 0 is never used.
    """

    name: str
    ids: list[int]
    labels: list[int]
    source: str = ""  # name of the source in a mixture

    def cut(self, length: int) -> "TokenSequence":
        """The first `length` tokens."""
        return replace(self, ids=self.ids[:length], labels=self.labels[:length])


class CountedMask(Tensor):
    """An attention mask whose sum the host knows.

    transformers asks at each forward pass whether there is padding; a GPU would first have to finish all earlier work.
    """

    ones: int

    @classmethod
    def of(cls, mask_BT: Tensor, ones: int) -> "CountedMask":
        """The mask, which marks `ones` tokens."""
        counted = mask_BT.as_subclass(cls)
        counted.ones = ones
        return counted

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - any result of the function
        """Answer what is asked of all; other results are plain tensors, except the same mask again."""
        mask = next(value for value in args if isinstance(value, CountedMask))
        if func in {Tensor.sum, torch.sum, Tensor.all, torch.all} and len(args) == 1 and not kwargs:
            whole = func in {Tensor.all, torch.all}
            return np.bool_(mask.ones == mask.numel()) if whole else np.int64(mask.ones)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
        same = func in {Tensor.to, Tensor.__getitem__} and result.shape == mask.shape
        return cls.of(result, mask.ones) if same else result


@dataclass(frozen=True)
class TokenBatch:
    """B sequences, padded on the right to the longest of them."""

    input_ids: Int64[Tensor, "B T"]
    attention_mask: Int64[Tensor, "B T"]  # 1 = token, 0 = padding
    labels: Int64[Tensor, "B T"]  # not shifted; -100 where the token does not count in the loss
    names: list[str]
    is_text: bool = True  # False: random tokens
    layers: int | None = None  # number of first layers that read it; None: all
    source: str = ""  # of its first sequence, in a mixture

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return int(np.count_nonzero(self.attention_mask.numpy()))

    def rows(self, device: torch.device) -> Int64[Tensor, "N"]:
        """Numbers of the tokens among the B·T positions, on a device: it finds them only by making the host wait."""
        return send(torch.from_numpy(np.flatnonzero(self.attention_mask.numpy())), device, torch.int64)

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` on a device, as arguments of a model."""
        input_ids, mask_BT = (send(tensor, device, torch.int64) for tensor in (self.input_ids, self.attention_mask))
        return {"input_ids": input_ids, "attention_mask": CountedMask.of(mask_BT, self.tokens)}


def batch_sequences(sequences: Sequence[TokenSequence], batch_tokens: int, pad_id: int) -> list[TokenBatch]:
    """Batch sequences in order with B·T <= batch_tokens; a longer sequence is a batch of its own."""
    groups = group_lengths([len(sequence.ids) for sequence in sequences], batch_tokens)
    return [_pad(sequences[group.start : group.stop], pad_id) for group in groups]


def split_batch(batch: TokenBatch, batch_tokens: int) -> list[TokenBatch]:
    """Split into batches of at least one sequence, B·T <= batch_tokens, each padded to its own longest sequence."""
    rows = max(1, batch_tokens // batch.input_ids.shape[1])
    parts = []
    for start in range(0, len(batch.names), rows):
        those = slice(start, start + rows)
        width = int(batch.attention_mask[those].sum(1).max())
        tensors = {name: getattr(batch, name)[those, :width] for name in ("input_ids", "attention_mask", "labels")}
        parts.append(replace(batch, **tensors, names=batch.names[those]))
    return parts


def first_batches(batches: Sequence[TokenBatch], tokens: int) -> list[TokenBatch]:
    """The first batches, until they hold `tokens`."""
    before = accumulate((batch.tokens for batch in batches), initial=0)
    return [batch for batch, seen in zip(batches, before, strict=False) if seen < tokens]


def group_lengths(lengths: Sequence[int], batch_tokens: int) -> list[range]:
    """Ranges of sequences that share a batch: count times greatest length <= `batch_tokens`, or one sequence."""
    groups: list[range] = []
    start = longest = 0
    for number, length in enumerate(lengths):
        longest = max(longest, length)
        if number > start and (number - start + 1) * longest > batch_tokens:
            groups.append(range(start, number))
            start, longest = number, length
    return [*groups, range(start, len(lengths))] if lengths else groups


def _pad(group: Sequence[TokenSequence], pad_id: int) -> TokenBatch:
    def pad(rows: Iterable[list[int]], value: int) -> Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)

    input_ids = pad((sequence.ids for sequence in group), pad_id)
    attention_mask = pad(([1] * len(sequence.ids) for sequence in group), 0)
    labels = pad((sequence.labels for sequence in group), IGNORED)
    names = [sequence.name for sequence in group]
    return TokenBatch(input_ids, attention_mask, labels, names, source=group[0].source)
