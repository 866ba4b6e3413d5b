"""Data for fitting: the dense checkpoint, batches of calibration text and random tokens, and their layer passes."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from instruments.cpu import has_amx
from instruments.device import allow_rounded_products, rounded_products
from instruments.errors import NumericsError
from models.config import ModelConfig
from models.ffn import DenseFFN
from models.finding import find_decoder
from models.loading import KEPT_BLOCK, load_tokenizer, padding_id, resolve_device
from models.source import resolve_folder
from models.stream import LayerStream, Passage, StreamLayer
from stages.artifacts.job import ALONE, Job, Workers
from stages.calibration.config import VocabularyConfig
from stages.calibration.share import Share, take_tokens
from stages.calibration.token_memory import KEPT, Keep, TokenMemory, as_it_is, memory_limit
from stages.losses import MeanLoss, mean_loss, sum_losses
from stages.text.batches import IGNORED, TokenBatch, TokenSequence, batch_sequences
from stages.text.config import DataConfig
from stages.text.sequences import find_begin, load_further, load_text, missing_begin

logger = logging.getLogger(__name__)

OFFSET = 1000  # of the Zipf-Mandelbrot law, so that rare tokens are drawn too
SEED = 0


def draw_sequences(
    tokenizer: PreTrainedTokenizerBase, met: Collection[int], tokens: int, length: int
) -> list[TokenSequence]:
    """Draw at most `tokens` different tokens, in sequences of at most `length`; none has a label.

    As in text, every sequence starts with the begin token of a tokenizer that has one. Special tokens, added tokens and
    those in `met` are not drawn. A token's weight is 1 / (rank of its id + OFFSET), because BPE numbers merges in the
    order they were learnt, frequent ones first. The seed is fixed.
    """
    known = {*met, *tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    ids_V = torch.tensor(sorted(set(tokenizer.get_vocab().values())))
    weights_V = 1.0 / (torch.arange(len(ids_V), dtype=torch.float64) + OFFSET)
    weights_V[torch.isin(ids_V, torch.tensor(sorted(known)))] = 0.0
    count = min(tokens, int(weights_V.count_nonzero()))
    if not count:
        return []
    drawn_T = ids_V[weights_V.multinomial(count, generator=torch.Generator().manual_seed(SEED))]
    first = missing_begin(find_begin(tokenizer), [])
    parts = (first + ids_T.tolist() for ids_T in torch.split(drawn_T, length - len(first)))
    return [TokenSequence(f"vocabulary {number}", ids, [IGNORED] * len(ids)) for number, ids in enumerate(parts)]


# The validation split consists of whole batches and would be too coarse with fewer of them.
LEAST_BATCHES = 16


def calibration_batches(
    data: DataConfig, vocabulary: VocabularyConfig, tokenizer: PreTrainedTokenizerBase, batch_tokens: int
) -> list[TokenBatch]:
    """Batches of the calibration split, then of `vocabulary.tokens` random tokens, at most as many as in the text.

    A batch holds at most `batch_tokens`, fewer if the text would otherwise make less than 16 batches.
    """
    sequences = load_text(data, tokenizer, "calibration").sequences
    batches, size, total = _batch(sequences, tokenizer, batch_tokens)
    if not vocabulary.tokens:
        return batches
    met = {id_ for sequence in sequences for id_ in sequence.ids}
    drawn = draw_sequences(tokenizer, met, min(vocabulary.tokens, total), data.max_length)
    random = batch_sequences(drawn, size, padding_id(tokenizer))
    return [*batches, *(replace(batch, layers=vocabulary.layers, is_text=False) for batch in random)]


def _batch(
    sequences: Sequence[TokenSequence], tokenizer: PreTrainedTokenizerBase, batch_tokens: int
) -> tuple[list[TokenBatch], int, int]:
    """The batches, the largest size of one, and the tokens of all."""
    total = sum(len(sequence.ids) for sequence in sequences)
    size = min(batch_tokens, max(1, total // LEAST_BATCHES))
    return batch_sequences(sequences, size, padding_id(tokenizer)), size, total


def count_positions(batches: Sequence[TokenBatch]) -> int:
    """Tokens of the batches, padding included."""
    return sum(batch.input_ids.numel() for batch in batches)


@dataclass(frozen=True)
class CalibrationContext:
    """The dense checkpoint, data and workers of a stage that fits; made once per stage."""

    model: ModelConfig
    folder: Path  # of the dense checkpoint
    batches: list[TokenBatch]  # text, then random tokens
    device: torch.device
    seed: int
    workers: Workers  # that share the batches
    memory: TokenMemory  # for hidden states
    batch_tokens: int  # at most, of a batch
    # Batches of about so many tokens of the text behind `batches`; fewer, or none, where it ends.
    further: Callable[[int], list[TokenBatch]] = lambda _tokens: []

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        data: DataConfig,
        vocabulary: VocabularyConfig,
        seed: int,
        job: Job,
        batch_tokens: int = 4096,
    ) -> "CalibrationContext":
        """Find the dense checkpoint and tokenise the calibration split. Raises UserError.

        On a CPU the activations of an FFN for a batch are smaller than the blocks of memory that the process keeps.
        """
        workers = job.workers
        model = replace(model, device=workers.pick_device(model.device))
        folder = resolve_folder(model)
        tokenizer = load_tokenizer(folder, trust_remote_code=model.trust_remote_code)
        memory, device = TokenMemory(job.scratch, memory_limit(model, workers.local_world)), resolve_device(model)
        if device.type == "cpu":
            batch_tokens = min(batch_tokens, (KEPT_BLOCK - 1) // (4 * find_decoder(folder).width))
        batches = calibration_batches(data, vocabulary, tokenizer, batch_tokens)
        allow_rounded_products(allowed=model.rounded_products)
        if rounded := {"cuda": "TF32", "cpu": "bfloat16" if has_amx() else ""}.get(device.type):
            products = rounded if model.rounded_products else "float32"
            logger.info("matrix products of moments, router fits and descent: %s (model.rounded_products)", products)

        def further(tokens: int) -> list[TokenBatch]:
            return _batch(load_further(data, tokenizer, tokens), tokenizer, batch_tokens)[0]

        return cls(model, folder, batches, device, seed, workers, memory, batch_tokens, further)

    @property
    def text(self) -> list[TokenBatch]:
        """The batches of text, which come first."""
        return [batch for batch in self.batches if batch.is_text]


def text_sources(batches: Sequence[TokenBatch]) -> list[str]:
    """The source of each batch of text."""
    return [batch.source for batch in batches if batch.is_text]


def layer_seed(seed: int, index: int) -> int:
    """The seed of a layer; different for all pairs of `seed` and `index` < 10,007.

    A stage that must not repeat the random numbers of another adds an offset to `index`.
    """
    return seed * 10_007 + index


class TokenStream:
    """Hidden states on their way through the layers: `enter` a layer, fit on its FFN inputs, `leave` with its outputs.

    Between `enter` and `leave`, `inputs` holds the FFN inputs of every batch, (T, D) without padding. Hidden states,
    inputs and results of `inputs.map` go to disk if they do not fit into `memory`.

    Batches that pass only the first layers come last, so that the others keep their places when these are removed.
    """

    inputs: Share

    def __init__(
        self,
        stream: LayerStream,
        batches: Sequence[TokenBatch],
        workers: Workers = ALONE,
        memory: TokenMemory | None = None,
        *,
        exact: bool = False,
    ) -> None:
        """Embed this worker's share of the batches; all workers pass the same `batches`.

        Unless `exact`, a CPU may round the factors of the layers' products, and those of `outputs` of `leave`.
        """
        self._rounded = partial(rounded_products, use=not exact, on=["cpu"])
        self._mine, mine = slice(workers.rank, None, workers.world), batches[workers.rank :: workers.world]
        # Indices of the real tokens: with masks, every use would wait for the GPU to count them.
        self._real = [batch.attention_mask.flatten().nonzero()[:, 0].to(stream.device) for batch in mine]
        like = torch.empty(0, stream.reader.decoder.hidden, device=stream.device)
        self._keep: Keep = as_it_is
        if memory and stream.device.type == "cpu":
            # With several processes, this one may also receive the others' inputs and outputs.
            tokens = KEPT * count_positions(mine) + 2 * (count_positions(batches) if workers.world > 1 else 0)
            self._keep = memory.reserve(tokens * like.shape[1] * like.element_size())
        self.passages: list[Passage] = []
        for passage in stream.embed(batch.input_ids for batch in mine):
            passage.hidden_BTD = self._keep(passage.hidden_BTD)
            self.passages.append(passage)
        self._layers = [batch.layers for batch in batches]  # number of layers each batch passes; None: all
        sources = text_sources(batches)
        self._share = partial(Share, like=like, workers=workers, keep=self._keep, sources=sources)
        self._sizes = [batch.tokens for batch in batches]
        self.inputs = self._share([], [])
        self.entered = 0  # number of layers
        self._layer: StreamLayer | None = None

    def enter(self, layer: StreamLayer) -> None:
        """Run the layer's attention and set `inputs`. Raises NumericsError: an FFN input is not finite."""
        self._layer = layer
        while self._layers and self._layers[-1] is not None and self._layers[-1] <= self.entered:
            del self._layers[-1], self._sizes[-1]
        held = len(self._sizes[self._mine])
        del self._real[held:], self.passages[held:]
        self.entered += 1
        inputs: list[Tensor] = []
        for passage, real_t in zip(self.passages, self._real, strict=True):
            with self._rounded():
                x_BTD = layer.attend(passage, self._keep)
            inputs.append(self.inputs.keep(x_BTD.flatten(0, 1)[real_t]))
        self.inputs = self._share(inputs, list(self._sizes))
        if inputs and not bool(torch.stack([x_TD.isfinite().all() for x_TD in inputs]).all()):
            what = "hidden states are not finite"
            do = "check the weights of the layers before it, or use a wider number format"
            raise NumericsError(what, where=f"FFN input of layer {self.entered - 1}", do=do)

    def leave(self, outputs: Iterable[Tensor]) -> None:
        """Go on behind the layer with the FFN's outputs, (T, D) for every batch of `inputs`."""
        assert self._layer is not None, "enter a layer first"
        with self._rounded():
            for passage, real_t, output_TD in zip(self.passages, self._real, outputs, strict=True):
                self._layer.add(passage, real_t, output_TD)
        self.inputs, self._layer = self._share([], []), None


@torch.no_grad()
def passed_losses(
    streams: Mapping[str, TokenStream],
    stream: LayerStream,
    batches: Sequence[TokenBatch],
    workers: Workers = ALONE,
    dense: Sequence[Tensor] = (),
) -> dict[str, MeanLoss]:
    """Next-token losses of hidden states after the last layer, by name; one sequence at a time: logits are large.

    `dense` holds the dense model's (B, T, D) states after its last layer, for this worker's batches; without, no KL.
    """
    logits, found = stream.head(), {name: dict[int, Tensor]() for name in streams}
    for place, number in enumerate(range(len(batches))[workers.rank :: workers.world]):
        states = {name: tokens.passages[place].hidden_BTD for name, tokens in streams.items()}
        sums: dict[str, list[Tensor]] = {name: [] for name in streams}
        for row in range(len(batches[number].names)):
            ids_1T, labels_1T = (ids_BT[row, None] for ids_BT in (batches[number].input_ids, batches[number].labels))
            wanted_1TV = logits(Passage(ids_1T, dense[place][row, None].to(stream.device).float())) if dense else None
            for name, hidden_BTD in states.items():
                found_1TV = logits(Passage(ids_1T, hidden_BTD[row, None]))
                sums[name].append(sum_losses(found_1TV, labels_1T.to(stream.device), wanted_1TV))
        for name, rows in sums.items():
            sums_4B = torch.stack(rows, dim=1)
            found[name][number] = torch.cat([sums_4B[:3].sum(1), sums_4B[3]])
    return {name: mean_loss(sums, batches, workers) for name, sums in found.items()}


@dataclass
class DealtLayer:
    """A layer that one worker fits: the FFN and its inputs, (T, D) for every batch of all workers.

    The inputs are valid until the next layer is requested.
    """

    index: int
    ffn: DenseFFN
    inputs: list[Tensor]
    keep: Keep  # stores what is computed from all inputs
    # The FFN's outputs, if the worker computed them; a single process then leaves the layer with them.
    outputs: Sequence[Tensor] | None = None


def deal_layers(
    stream: LayerStream, batches: Sequence[TokenBatch], workers: Workers, memory: TokenMemory | None = None
) -> Iterator[DealtLayer | None]:
    """Run the dense model W layers at a time, each of W workers with its share of the batches.

    Then each worker gets one of the W layers with all tokens, so that the result for a layer does not depend on W.
    Workers without a layer in the last turn get None.
    """
    tokens, dealt, world = TokenStream(stream, batches, workers, memory), None, workers.world
    for index, layer in enumerate(stream.layers()):
        tokens.enter(layer)
        inputs, outputs = tokens.inputs.gather(at=index % world), None
        if index % world == workers.rank:
            dealt = DealtLayer(index, layer.ffn, inputs, tokens.inputs.keep)
        if index % world == world - 1 or index == stream.depth - 1:
            yield dealt
            if dealt:  # the caller may still hold it while the next layer needs memory
                outputs, dealt.outputs = dealt.outputs if world == 1 else None, None
                dealt.inputs.clear()
            dealt = None
        if index < stream.depth - 1:  # nothing reads the last layer's outputs
            tokens.leave(map(layer.ffn, tokens.inputs) if outputs is None else outputs)
        del inputs, outputs


@dataclass(frozen=True)
class LayerSample:
    """Inputs and outputs of one layer's FFN, (t, D) per batch."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    sources: Sequence[str] | None = None  # of the batches; None: all are of one source


@torch.no_grad()
def sample_layers(
    stream: LayerStream,
    batches: Sequence[TokenBatch],
    tokens: int,
    workers: Workers = ALONE,
    memory: TokenMemory | None = None,
) -> tuple[list[LayerSample | None], Callable[[Tensor], Tensor]]:
    """Run the dense model once; sample about `tokens` tokens, evenly spaced over each batch, the same in every layer.

    Workers share the pass; each gets the samples of every W-th layer, None for the others. Also returns the activation
    function.
    Memory: 2·L·D numbers per token, shared by the workers.
    """
    passing, samples, world = TokenStream(stream, batches, workers, memory), list[LayerSample | None](), workers.world
    sources = text_sources(batches)
    for index, layer in enumerate(tqdm(stream.layers(), total=stream.depth, desc="sample", unit="layer")):
        passing.enter(layer)
        with rounded_products(on=["cpu"]):
            given = passing.inputs.map(layer.ffn)
        inputs, outputs = (taken.gather(at=index % world) for taken in take_tokens(passing.inputs, given, tokens))
        samples.append(LayerSample(inputs, outputs, sources) if index % world == workers.rank else None)
        passing.leave(given)
    return samples, layer.ffn.act
