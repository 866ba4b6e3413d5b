"""The data by which a layer's neurons are grouped: statistics, scores, activity on text, features."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from instruments.errors import ConfigError
from models.checkpoint.shards import ShardReader
from models.config import ModelConfig
from models.ffn import DenseFFN
from models.loading import load_tokenizer, resolve_device
from models.source import resolve_folder
from models.stream import LayerStream
from stages.artifacts.job import ALONE, Workers
from stages.artifacts.statistics import NeuronStatistics, Scores
from stages.calibration.batches import calibration_batches, deal_layers, evenly_spaced, take_rows
from stages.calibration.config import VocabularyConfig
from stages.calibration.token_memory import TokenMemory, memory_limit
from stages.cluster.config import ClusterConfig
from stages.text.config import DataConfig
from stages.text.sequences import TokenBatch


@dataclass(frozen=True)
class LayerActivity:
    """A layer's FFN and its inputs, (T, D) per batch, without padding; valid until the next layer is requested."""

    ffn: DenseFFN
    inputs: Sequence[Tensor]

    @property
    def tokens(self) -> int:
        """Number of tokens in all batches."""
        return sum(map(len, self.inputs))

    def sample(self, tokens: int) -> Float[Tensor, "T D"]:
        """The inputs of at most `tokens` tokens, evenly spaced over the text."""
        return take_rows(self.inputs, evenly_spaced(self.tokens, tokens))


def open_activities(
    model: ModelConfig,
    data: DataConfig,
    vocabulary: VocabularyConfig,
    batch_tokens: int,
    workers: Workers = ALONE,
    scratch: Path | None = None,
) -> Iterator[LayerActivity | None]:
    """Run the dense model over the calibration text and yield the activity of every layer in order.

    Each of W workers gets every W-th layer; in the last turn, workers without a layer get None.
    Memory: one layer, and the hidden states of all tokens, which go to files in `scratch` if they exceed the limit.
    """
    folder = resolve_folder(model)
    memory = TokenMemory(scratch, memory_limit(model, workers.local_world)) if scratch else None
    tokenizer = load_tokenizer(folder, trust_remote_code=model.trust_remote_code)
    batches = calibration_batches(data, vocabulary, tokenizer, batch_tokens)
    with LayerStream(folder, device=resolve_device(model)) as stream:
        yield from stream_activities(stream, batches, workers, memory)


def stream_activities(
    stream: LayerStream,
    batches: Sequence[TokenBatch],
    workers: Workers = ALONE,
    memory: TokenMemory | None = None,
) -> Iterator[LayerActivity | None]:
    """`open_activities` for an open model; requesting the next layer runs the FFN of this one."""
    for dealt in deal_layers(stream, batches, workers, memory):
        yield LayerActivity(dealt.ffn, dealt.inputs) if dealt else None


FEATURES, GROUPING, LAYOUT, CONTROL = range(4)  # purposes of a layer's random number streams


@dataclass(frozen=True)
class LayerEvidence:
    """A layer's statistics and scores, and its activity if the settings need a pass."""

    layer: int
    model: ModelConfig
    statistics: NeuronStatistics  # of all layers, like the scores
    scores: Scores | None  # None: nothing is ranked by score
    seed: int
    pass_activity: LayerActivity | None = None

    @property
    def activity(self) -> LayerActivity:
        """Activity on the calibration text; only if `needs_pass` in config.py is true."""
        assert self.pass_activity is not None, "no pass was made, see needs_pass in config.py"
        return self.pass_activity

    @property
    def score_F(self) -> Float[Tensor, "F"]:
        """Scores of the layer's neurons; only if `reads_score` in config.py is true."""
        assert self.scores is not None, "no score was read, see reads_score in config.py"
        return self.scores.chosen[self.layer]

    @property
    def contribution_F(self) -> Float[Tensor, "F"]:
        """Mean |h|·‖d‖."""
        return self.statistics.contribution[self.layer]

    def draw(self, purpose: int) -> np.random.Generator:
        """A new generator, seeded by layer and purpose."""
        return np.random.default_rng((self.seed, self.layer, purpose))


CHUNK = 1024  # neurons unpacked at a time: 32 MiB at 8192 tokens
SWEEPS = 3
FEATURE_DIMS = 64  # singular directions kept


def coactivation_features(
    active_bits_Fr: UInt8[Tensor, "F r"], tokens: int, *, dims: int, rng: np.random.Generator
) -> Float[Tensor, "F C"]:
    """Each neuron's activation bits over R reservoir tokens, projected onto their leading singular directions.

    Up to this projection, the cosine of two rows is |i∩j| / √(|i|·|j|), where |i∩j| counts the tokens on which both
    neurons fire. Bits are packed, most significant first.

    Returns:
        ``(F, min(dims, R))`` fp32; the zero row for a neuron that never fires.
    """
    return _project_on_top_directions(
        lambda start, stop: unpack_bits(active_bits_Fr[start:stop], tokens), len(active_bits_Fr), tokens, dims, rng
    )


def gate_row_features(gate_FD: Float[Tensor, "F D"], *, dims: int, rng: np.random.Generator) -> Float[Tensor, "F C"]:
    """Each neuron's gate row, projected onto the leading singular directions; C = min(dims, D)."""
    return _project_on_top_directions(
        lambda start, stop: gate_FD[start:stop].float(), len(gate_FD), gate_FD.shape[1], dims, rng
    )


def unpack_bits(packed_Ur: UInt8[Tensor, "U r"], tokens: int) -> Float[Tensor, "U R"]:
    """Unpack bits to fp32 zeros and ones."""
    return torch.from_numpy(np.unpackbits(packed_Ur.numpy(), axis=1, count=tokens)).float()


def _project_on_top_directions(
    rows: Callable[[int, int], Tensor], count: int, width: int, dims: int, rng: np.random.Generator
) -> Float[Tensor, "F C"]:
    """Coordinates of all rows in the span of their leading right singular vectors, a chunk of rows in memory at a time.

    Clustering needs only cosines within the span, so the singular vectors themselves are not computed.
    Source: randomised subspace iteration, arXiv:0909.4061 algorithm 4.4.
    """
    starts = range(0, count, CHUNK)
    directions_MC = torch.from_numpy(rng.standard_normal((width, min(dims, width)), dtype=np.float32))
    for _ in range(SWEEPS):
        pulled_MC = torch.zeros_like(directions_MC)
        for start in starts:
            chunk_UM = rows(start, start + CHUNK)
            pulled_MC += chunk_UM.T @ (chunk_UM @ directions_MC)
        directions_MC = torch.linalg.qr(pulled_MC).Q
    return torch.cat([rows(start, start + CHUNK) @ directions_MC for start in starts])


def view_neurons(cluster: ClusterConfig, evidence: LayerEvidence) -> Float[Tensor, "F C"]:
    """Features of a layer's neurons, of the kind that `cluster.features` names.

    Raises:
        ConfigError: the scan did not keep them.
    """
    rng = evidence.draw(FEATURES)
    if cluster.features == "gate_rows":
        folder = resolve_folder(evidence.model)
        with ShardReader(folder) as reader:
            gate_FD = reader.tensor(reader.family.ffn(evidence.layer)[0])
        return gate_row_features(gate_FD, dims=FEATURE_DIMS, rng=rng)
    statistics = evidence.statistics
    if not statistics.reservoir_tokens:
        raise ConfigError(
            "the scan kept no activation bitmaps to compare neurons by",
            where="stage=cluster, setting cluster.features",
            do="scan.reservoir_tokens=4096, or cluster.features=gate_rows",
        )
    bits_Fr = statistics.active_bits[evidence.layer]
    return coactivation_features(bits_Fr, statistics.reservoir_tokens, dims=FEATURE_DIMS, rng=rng)
