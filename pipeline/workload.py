"""The sizes of a run, and the cost of its work."""

from dataclasses import dataclass, replace
from math import inf

from models.config import MoEShape
from models.targets.config import count_dense, source_dtype
from pipeline.disk import BYTES
from pipeline.settings import Settings
from pipeline.validate import Checked
from stages.artifacts.job import find_workers
from stages.calibration.token_memory import KEPT, memory_limit

PROGRAM = 560 * 2**20  # bytes of host memory of an idle process with torch and transformers
DRAWING = 220 * 2**20  # additional bytes once a map was drawn


@dataclass(frozen=True)
class Sizes:
    """Sizes of the dense model and of the carved shape."""

    layers: int  # L
    hidden: int  # D
    width: int  # F neurons of a dense FFN
    vocabulary: int  # V
    attention: int  # weights of the attention matrices of a layer
    heads: int  # width of all heads together
    length: int  # tokens of a sequence
    parameters: int
    stored: int  # bytes of a weight on disk
    experts: int  # E
    n: int  # neurons of an expert
    top_k: int  # K, chosen for a token
    always_on: int  # S neurons
    dense: int  # layers whose FFN is not carved
    processes: int
    on_host: bool  # the model computes on the CPU
    room: float  # bytes of memory for hidden states, per process; the excess is stored on disk

    @property
    def active(self) -> int:
        """A = S + K·N, active neurons."""
        return self.always_on + self.top_k * self.n

    @property
    def carved(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense

    @property
    def carved_weights(self) -> int:
        """Weights of a carved layer's FFN."""
        return 3 * self.hidden * (self.always_on + self.experts * self.n)

    @property
    def added_weights(self) -> int:
        """Weights that the carved model has more than the dense model; may be negative."""
        return self.carved * (self.carved_weights - 3 * self.hidden * self.width)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one dense layer in fp32."""
        return 4 * (self.attention + 3 * self.hidden * self.width)

    def kept_bytes(self, tokens: float) -> int:
        """Bytes per process: three (T, D) tensors of its own tokens; with several processes also two of all tokens."""
        return int(4 * tokens * self.hidden * (KEPT / self.processes + 2 * (self.processes > 1)))

    def saved_bytes(self, tokens: int, width: int, checkpointing: bool) -> int:
        """Bytes for a backward pass: (T, 16·D + 8·width) that each layer saves, and three times the logits."""
        layers = 1 if checkpointing else self.layers
        return 4 * tokens * ((16 * self.hidden + 8 * width) * layers + 3 * self.vocabulary)


def with_vocabulary(tokens: int, settings: Settings, s: Sizes) -> int:
    """Calibration tokens plus random tokens, weighted by the share of the layers that random tokens pass."""
    vocabulary = settings.vocabulary
    layers = min(vocabulary.layers or s.layers, s.layers)
    return tokens + round(min(vocabulary.tokens, tokens, s.vocabulary) * layers / s.layers)


# Fields of a cost that are maxima over time; the others are sums.
PEAKS = {"tokens", "spilled", "device", "host"}


@dataclass(frozen=True)
class Cost:
    """The cost of a stage. Peaks are per process; on a CPU, `device` is host memory in addition to `host`."""

    tokens: int = 0
    products: float = 0.0  # FLOPs of matrix products
    solves: float = 0.0  # FLOPs of factorisations and triangular solves, in fp64
    touched: float = 0.0  # bytes read and written by everything else
    cells: float = 0.0  # neurons × experts of all assignment problems, on the host
    points: int = 0  # neurons of the maps
    read: int = 0  # bytes
    written: int = 0  # bytes
    spilled: int = 0  # bytes of hidden states on disk at the stage's peak, of all processes
    device: int = 0  # peak bytes of tensors
    host: int = PROGRAM  # peak bytes of the process without tensors

    def __add__(self, other: "Cost") -> "Cost":
        """Two costs in sequence: the sum of the work, the maximum of the peaks."""
        pairs = {name: (value, getattr(other, name)) for name, value in vars(self).items()}
        return Cost(**{name: max(pair) if name in PEAKS else sum(pair) for name, pair in pairs.items()})

    def during(self, other: "Cost") -> "Cost":
        """The sum of the work, with the tensors of both in memory: `other` runs inside of this cost."""
        return (self + other).add_memory(min(self.device, other.device))

    def add_memory(self, size: float) -> "Cost":
        """The same cost with `size` more bytes of tensors at its peak."""
        return replace(self, device=int(self.device + size))

    def __mul__(self, times: float) -> "Cost":
        """The work repeated; peaks do not change."""
        return Cost(**{name: value * (1 if name in PEAKS else times) for name, value in vars(self).items()})


def sizes_of(checked: Checked, *, on_host: bool) -> Sizes:
    """Sizes of this run; attention has Q, K, V and output projections. With `on_host` the host's memory is `room`."""
    settings, source, workers = checked.settings, checked.source, find_workers()
    shape = checked.shape or MoEShape(0, 0, 0, 0)
    hidden, heads = int(source["hidden_size"]), int(source["num_attention_heads"])
    head = int(source.get("head_dim") or hidden // heads)
    keys = int(source.get("num_key_value_heads") or heads)
    return Sizes(
        int(source["num_hidden_layers"]), hidden, int(source["intermediate_size"]), int(source["vocab_size"]),
        2 * hidden * head * (heads + keys), heads * head, settings.data.max_length, count_dense(source).total,
        BYTES.get(source_dtype(source) or "", 2), shape.experts, shape.n, shape.top_k, shape.always_on,
        len(shape.dense_layers), workers.world, on_host,
        memory_limit(settings.model, workers.local_world) if on_host else inf,
    )  # fmt: skip


def loaded_bytes(s: Sizes, settings: Settings, *, quantized: bool = True) -> int:
    """Bytes of the dense model as transformers loads it; with dtype=auto in fp32 on a CPU.

    `quantized`: as `model.quantization` says; not in train and evaluate, which compare with the stored weights.
    """
    model = settings.model
    if quantized and model.quantization in {"nf4", "fp4"}:
        return s.parameters * 5 // 8
    return s.parameters * BYTES.get(model.dtype, 4 if s.on_host else s.stored)
