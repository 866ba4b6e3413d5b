"""One forward pass, and the squared norms measured in it and in its backward pass."""

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from instruments.errors import NumericsError, some
from instruments.mscan.header import WatchedParameter
from instruments.parameter_scan.inputs import HeadPart, InputSquares
from instruments.parameter_scan.targets import ScannedSequence, ScanRecord, refusal

IGNORED = -100  # the label that losses ignore


@dataclass(frozen=True, eq=False)
class CallFacts:
    """Facts of a forward call: B samples of T positions; of an encoder-decoder, those of the encoder."""

    samples: int
    length: int
    mask_BT: Tensor | None  # True at tokens, False at padding; None: all are tokens
    supervised_B: Tensor | None  # number of labels in the loss, if it shifts them by one; None: unknown
    labelled_B: Tensor | None = None  # the same if it does not
    ids_BT: Tensor | None = None  # input_ids
    decoder: "CallFacts | None" = None  # of an encoder-decoder: the other sequences of the same samples

    def side(self, tensor: Tensor, name: str) -> "CallFacts | None":
        """The facts, or the decoder's, that apply to a module's input; None if its shape and name do not tell."""
        if self.decoder is None:
            return self
        pooled = tensor.ndim == 2 and len(tensor) == self.samples
        positions = tensor.shape[1] if tensor.ndim == 3 else len(tensor) // self.samples
        if self.length == self.decoder.length:
            same = self.mask_BT is None and self.decoder.mask_BT is None
            return self if pooled or same or "encoder" in name.split(".") else None
        return self if pooled else {self.length: self, self.decoder.length: self.decoder}.get(positions)

    def has_tokens(self, side: "CallFacts") -> bool:
        """Whether values per token can be recorded: a record has rows for the encoder's tokens only."""
        return self.decoder is None or (side is self and self.length != self.decoder.length)


def bind_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name; a wrapper that takes any arguments has the names of the model inside."""
    return dict(zip(_positional_names(model), args, strict=False)) | dict(kwargs)


def replace_argument(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, value: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with another value of `name`, which is one of them."""
    if name in kwargs:
        return args, {**kwargs, name: value}
    place = _positional_names(model).index(name)
    return (*args[:place], value, *args[place + 1 :]), dict(kwargs)


def _positional_names(model: nn.Module) -> list[str]:
    """Names of the arguments that forward takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    inside = list(model.children())
    return names if names or len(inside) != 1 else _positional_names(inside[0])


_DECODER_ARGUMENTS = ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask")


def read_call(arguments: Mapping[str, Any], *, encoder_decoder: bool = False) -> CallFacts:
    """Sizes, padding and number of supervised tokens, from the model's arguments.

    Raises:
        ConfigError: neither input_ids nor inputs_embeds, or an attention mask of another shape.
    """
    given = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    inputs = next((value for value in given if isinstance(value, Tensor)), None)
    if inputs is None:
        what = f"the model was called with {', '.join(sorted(arguments)) or 'nothing'}; its samples are unknown"
        raise refusal(what, "call the scanned model with input_ids=... or inputs_embeds=...")
    samples, length = inputs.shape[:2]
    ids_BT = None if inputs.is_floating_point() else inputs
    mask_BT, decoder = _padding_mask(arguments, "attention_mask", samples, length), None
    if encoder_decoder or any(arguments.get(name) is not None for name in _DECODER_ARGUMENTS):
        own = [arguments.get(name) for name in (*_DECODER_ARGUMENTS[:2], "labels")]
        own_length = next((value.shape[1] for value in own if isinstance(value, Tensor) and value.ndim > 1), length)
        own_mask_BT = _padding_mask(arguments, _DECODER_ARGUMENTS[2], samples, own_length)
        decoder = CallFacts(samples, own_length, own_mask_BT, None)
        mask_BT = None if mask_BT is not None and mask_BT.all() else mask_BT
    supervised_B, labelled_B = _supervised(arguments, samples)
    return CallFacts(samples, length, mask_BT, supervised_B, labelled_B, ids_BT, decoder)


def _padding_mask(arguments: Mapping[str, Any], name: str, samples: int, length: int) -> Tensor | None:
    mask = arguments.get(name)
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != samples or mask.shape[1] < length:
        found = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        what = f"{name} is {found}; the scanner reads padding from a mask of shape {(samples, length)}"
        raise refusal(what, f"pass the tokenizer's {name}, or none for samples without padding")
    # With a cache the mask also covers earlier positions.
    return mask[:, -length:] != 0


def _supervised(arguments: Mapping[str, Any], samples: int) -> tuple[Tensor | None, Tensor | None]:
    """Labels in the loss, per sample: without each sample's first, which a causal model's loss shifts away; and all."""
    shifted = arguments.get("shift_labels")
    labels = arguments.get("labels") if shifted is None else shifted
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.shape[0] != samples:
        return None, None
    used_BT = labels != IGNORED
    counts_B = used_BT.sum(1, dtype=torch.float32)
    return (used_BT[:, 1:].sum(1, dtype=torch.float32) if shifted is None else counts_B), counts_B


@dataclass(frozen=True)
class Layout:
    """The concatenated blocks of all parameters, and the parameter of each block."""

    parameters: Sequence[WatchedParameter]
    inputs: Tensor  # (I,) parameter of each input block
    outputs: Tensor  # (O,) parameter of each output block
    read: Tensor  # (I + embeddings,) parameter of each activation block; an embedding has one

    @classmethod
    def of(cls, parameters: Sequence[WatchedParameter]) -> "Layout":
        """The layout of a parameter table."""
        order = torch.arange(len(parameters))
        inputs = torch.tensor([parameter.in_blocks for parameter in parameters])
        outputs = torch.tensor([parameter.out_blocks for parameter in parameters])
        read = inputs.clamp(min=1)
        return cls(parameters, *(order.repeat_interleave(counts) for counts in (inputs, outputs, read)))

    def join(self, pieces: Mapping[int, Tensor], owners: Tensor, samples: int) -> Float[Tensor, "B n"]:
        """Concatenate the blocks of all parameters, NaN for parameters that were not measured."""
        counts = owners.bincount(minlength=len(self.parameters)).tolist()
        blocks = (pieces.get(index, torch.full((samples, count), torch.nan)) for index, count in enumerate(counts))
        return torch.cat(list(blocks), dim=1)

    def totals(self, squares_Bn: Float[Tensor, "B n"], owners: Tensor) -> Float[Tensor, "B P"]:
        """Sum over the blocks of every parameter."""
        return squares_Bn.new_zeros(len(squares_Bn), len(self.parameters)).index_add_(1, owners, squares_Bn)


@dataclass
class Squares:
    """Sums of squares per parameter, each on the device where it was measured."""

    activation: dict[int, Tensor] = field(default_factory=dict)  # (B, input blocks); embedding: (B, 1)
    in_gradient: dict[int, Tensor] = field(default_factory=dict)  # (B, input blocks)
    out_gradient: dict[int, Tensor] = field(default_factory=dict)  # (B, output blocks)
    # Per position, if requested: (B, T), or only the last positions.
    token_activation: dict[int, Tensor] = field(default_factory=dict)
    token_gradient: dict[int, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class ScanPass:
    """Facts of a forward pass, and the squares measured in the current backward pass.

    The probes in the graph reference it, so several forward passes before one backward pass each keep their own.
    """

    facts: CallFacts
    layout: Layout
    names: Sequence[str]
    source: str = ""
    per_token: bool = False
    ids: dict[int, Tensor] = field(default_factory=dict)  # (B, T) ids of each embedding's look-up
    used: set[str] = field(default_factory=set)  # modules that have run
    squares: Squares = field(default_factory=Squares)
    dropped: set[int] = field(default_factory=set)  # parameters whose norms would be wrong
    heads: dict[int, HeadPart] = field(default_factory=dict)  # gradient parts of tied output embeddings
    last_input: InputSquares | None = None  # of the module measured last
    positions_first: bool = False  # whether a layer received (T, B, N); known only where T equals B

    def note_order(self, ids_BT: Tensor) -> None:
        """Compare the ids of a look-up with the model's: a model that works on (T, B) transposes them first."""
        square, whole_BT = self.facts.samples == self.facts.length > 1, self.facts.ids_BT
        if square and whole_BT is not None and ids_BT is not whole_BT and ids_BT.shape == whole_BT.shape:
            ids_BT = ids_BT.to(whole_BT.device)
            if torch.equal(ids_BT, whole_BT.mT) and not torch.equal(ids_BT, whole_BT):
                self.positions_first = True

    def require_samples_first(self, tensor: Tensor, name: str) -> None:
        """With as many samples as positions, shapes do not tell them apart. Raises ConfigError: strides do not either.

        From a layer with transposed input on, all later layers of the pass are refused.
        """
        facts = self.facts.side(tensor, name) or self.facts
        if facts.samples != facts.length or facts.samples == 1:
            return
        if tensor.ndim == 3 and 0 < tensor.stride(0) < tensor.stride(1):
            self.positions_first = True
        if self.positions_first or (tensor.ndim == 2 and len(tensor) == facts.samples):
            what = f"{name} was given a tensor of shape {tuple(tensor.shape)}"
            raise refusal(
                f"{what}; its rows may be the {facts.samples} samples or the {facts.length} positions",
                "batches of another number of samples",
            )

    def take(self) -> Squares:
        """Return the measured squares and reset them for the next backward pass through the same graph."""
        taken, self.squares, self.heads, self.last_input = self.squares, Squares(), {}, None
        for found in vars(taken).values():
            for index in self.dropped & set(found):
                del found[index]
        return taken


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the CPU in their own number formats, with one transfer per device."""
    places: dict[torch.device, list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        places[tensor.device].append(place)
    found = list(tensors)
    for group in places.values():
        moved = torch.cat([tensors[place].detach().contiguous().view(-1).view(torch.uint8) for place in group]).cpu()
        sizes = [tensors[place].numel() * tensors[place].element_size() for place in group]
        for place, data in zip(group, moved.split(sizes), strict=True):
            # Cloned for the alignment that the number format needs.
            found[place] = data.clone().view(tensors[place].dtype).view(tensors[place].shape)
    return found


class Measured(NamedTuple):
    """A finished pass."""

    scan_pass: ScanPass
    squares: Squares


def to_record(measured: Measured, *, gradients: bool) -> tuple[ScanRecord | None, list[str]]:
    """The record of a pass, and the names of samples left out because they have no supervised token.

    A sample whose only label is its first has none if the model shifts labels: its gradient is zero or not finite.

    All transfers happen here. Raises NumericsError: with `gradients`, those of a sample are missing, all zero or not
    finite.
    """
    scan_pass = measured.scan_pass
    squares, mask_BT, counts_B = _fetch(measured)
    kept = torch.ones(len(mask_BT), dtype=torch.bool)
    all_norms = _by_parameter_and_block(scan_pass.layout, squares, len(kept))
    if gradients and counts_B:
        found_BP = all_norms[1][:, sorted(squares.out_gradient)]
        trained = found_BP.isfinite().all(1) & found_BP.any(1)
        supervised_B = counts_B["supervised_B"]
        kept = (supervised_B > 0) | ((counts_B.get("labelled_B", supervised_B) > 0) & trained)
    indices = kept.nonzero().flatten().tolist()
    skipped = [name for name, keep in zip(scan_pass.names, kept.tolist(), strict=True) if not keep]
    if not indices:
        return None, skipped
    norms = [values_BN[kept] for values_BN in all_norms]
    counts = mask_BT.sum(1).tolist()
    sequences = [ScannedSequence(scan_pass.names[index], counts[index], scan_pass.source) for index in indices]
    if gradients:
        measured_names = {index: scan_pass.layout.parameters[index].name for index in sorted(squares.out_gradient)}
        _check(norms[1], measured_names, [sequence.name for sequence in sequences])
    tokens = _by_token(scan_pass, squares, mask_BT, indices) if scan_pass.per_token else (None, None)
    return ScanRecord(sequences, norms[0], norms[1], norms[2], norms[3], norms[4], *tokens), skipped


def _by_parameter_and_block(layout: Layout, squares: Squares, samples: int) -> list[Tensor]:
    """The five tensors of a record: activation and gradient in total, both by input block, gradient by output block."""
    read = layout.join(squares.activation, layout.read, samples)
    in_gradient = layout.join(squares.in_gradient, layout.inputs, samples)
    out_gradient = layout.join(squares.out_gradient, layout.outputs, samples)
    linear = torch.tensor([parameter.kind == "linear" for parameter in layout.parameters])
    in_activation = read[:, linear[layout.read]]
    totals = layout.totals(read, layout.read), layout.totals(out_gradient, layout.outputs)
    return [values.sqrt() for values in (*totals, in_activation, in_gradient, out_gradient)]


def _by_token(
    scan_pass: ScanPass, squares: Squares, mask_BT: Tensor, indices: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Per sample (tokens, P): norms of activations and of each position's gradient contribution."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for group, pieces in zip(found, (squares.token_activation, squares.token_gradient), strict=True):
        table_BTP = torch.full((*mask_BT.shape, len(scan_pass.layout.parameters)), torch.nan)
        for index, squares_BS in pieces.items():
            # A module called with only the last positions fills those.
            table_BTP[:, -squares_BS.shape[1] :, index] = squares_BS
        group += [table_BTP[index][mask_BT[index]].sqrt_() for index in indices]
    return found


def _fetch(measured: Measured) -> tuple[Squares, Tensor, dict[str, Tensor]]:
    """Squares, mask (B, T) and numbers of labels (B,), if known, on the CPU."""
    facts, squares = measured.scan_pass.facts, Squares()
    groups = zip(vars(squares).values(), vars(measured.squares).values(), strict=True)
    places = [(group, index) for group, found in groups for index in found]
    tensors = [tensor for group in vars(measured.squares).values() for tensor in group.values()]
    # The call's facts are transferred together with the first device's tensors.
    device = tensors[0].device if tensors else torch.device("cpu")
    counted = {name: getattr(facts, name) for name in ("mask_BT", "supervised_B", "labelled_B")}
    known = {name: fact for name, fact in counted.items() if fact is not None}
    found = to_host([*tensors, *(fact.to(device, torch.float32) for fact in known.values())])
    for (group, index), tensor in zip(places, found, strict=False):
        group[index] = tensor
    call = dict(zip(known, found[len(places) :], strict=True))
    mask_BT = torch.ones(facts.samples, facts.length, dtype=torch.bool)
    return squares, (call.pop("mask_BT") > 0 if "mask_BT" in call else mask_BT), call


def _check(gradient_BP: Tensor, measured: Mapping[int, str], names: Sequence[str]) -> None:
    found_BP = gradient_BP[:, [*measured]]
    # List the last weight first: the backward pass starts there and propagates non-finite values.
    weights = [name for name, fine in zip(measured.values(), found_BP.isfinite().all(0), strict=True) if not fine][::-1]
    for what, bad, do in (
        (
            "no gradient reached a watched parameter",
            [] if measured else names,
            "call backward on a loss of what the scanned model returned",
        ),
        (
            "the gradient is not finite",
            [name for name, row in zip(names, found_BP, strict=True) if not row.isfinite().all()],
            "look for a sample without a supervised next token, or scan in another format: float32 or bfloat16",
        ),
        (
            "all gradients are zero",
            [name for name, row in zip(names, found_BP, strict=True) if not row.any()],
            "see that the loss uses these samples (labels not all masked; the first label of a sample is shifted "
            "away), and that gradients do not vanish in the number format: float32, or a scaled loss",
        ),
    ):
        if bad:
            where = some(bad) + (f"; of {some(weights, 3, ', ')}" if weights else "")
            raise NumericsError(f"{what} in {len(bad)} of {len(names)} samples", where=where, do=do)
