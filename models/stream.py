"""Run a dense model layer by layer from its shards, one layer in memory at a time.

Several streams of hidden states (dense model, carved model, baselines) can pass the same layer, each with its own FFN.
Everything but the FFN is transformers' own code, in every family. One model with empty layers computes the arguments of
each layer. A layer runs until its FFN is called, and continues with the output that the caller gives.
Memory: the hidden states, what a layer computes before its FFN, and one layer.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from instruments.errors import CheckpointError
from instruments.tensors import find_tensors
from models.checkpoint.shards import DenseReader
from models.device import fetch_ahead, pinned, send
from models.ffn import DenseFFN
from models.loading import explained_loading
from models.structure import model_class
from models.tiny_onn.sparse_ffn import find_activation

Keep = Callable[[Tensor], Tensor]  # moves a tensor to where it is kept
Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a layer

_LAZY_ROWS = 4096  # of an embedding of more rows, only those in use are in memory
_SHAPES_KEPT = 64  # shapes of batches whose masks and rotations are kept, since every layer and stream needs them


class _Reached(Exception):  # noqa: N818 - no error
    """Ends a forward pass at the place that was looked for."""


@dataclass
class Passage:
    """One batch on its way through the layers."""

    ids_BT: Int[Tensor, "B T"]
    hidden_BTD: Float[Tensor, "B T D"]  # before a layer; between `attend` and `add` of a plain layer, after attention
    handed: dict[str, Any] = field(default_factory=dict)  # what layers give to later ones, such as shared keys
    computed: dict[str, list[Any]] = field(default_factory=dict)  # module → outputs before the FFN of this layer
    call: Call | None = None  # this layer's arguments, if they depend on token ids: computing them takes a pass


class StreamLayer:
    """One decoder layer: its FFN by the caller, everything else by transformers' own code."""

    def __init__(self, stream: "LayerStream", index: int, module: nn.Module, ffn: DenseFFN) -> None:
        """Replace the FFN of transformers' `module` by one that keeps its input and returns the given output."""
        self.ffn = ffn
        self._stream, self._index, self._module = stream, index, module
        self._inputs: Tensor | None = None
        self._output: Tensor | None = None  # of the FFN; None: the pass ends there
        path = stream.reader.decoder.ffn.path
        if self.ffn.width:
            module.get_submodule(path).forward = self._exchange
        # Modules with matrices are not run a second time.
        self._parts = {
            name: child
            for name, child in module.named_children()
            if name != path.partition(".")[0] and any(parameter.ndim > 1 for parameter in child.parameters())
        }
        self._plain: bool | None = None  # not yet known

    def _exchange(self, x_BTD: Tensor, *_args: object, **_arguments: object) -> Tensor:
        self._inputs = x_BTD
        if self._output is None:
            raise _Reached
        return self._output

    def _run(self, passage: Passage, output_BTD: Tensor | None) -> Tensor:
        """The layer's output with this output of its FFN. Raises _Reached: there is none yet."""
        args, arguments = self._stream.arguments(self._index, passage)
        self._output = output_BTD
        forward = partial(type(self._module).forward, self._module)  # the module's own attribute is the stand-in
        if args:
            result = forward(passage.hidden_BTD, *args[1:], **arguments)
        else:
            result = forward(**{**arguments, "hidden_states": passage.hidden_BTD})
        hidden: Tensor = result if isinstance(result, Tensor) else result[0]
        return hidden

    @torch.no_grad()
    def attend(self, passage: Passage, keep: Keep = lambda tensor: tensor) -> Float[Tensor, "B T D"]:
        """The FFN's input. `passage` is changed: `add` needs it so. `keep` stores what was computed before the FFN.

        Right padding needs no mask: in causal attention no real token attends to it. Of a layer without an FFN, the
        input of an FFN of no neurons is the layer's output.
        """
        if not self.ffn.width:
            self._plain = True
            passage.hidden_BTD.copy_(self._run(passage, None))
            return passage.hidden_BTD
        if self._plain is None:
            self._plain = self._is_plain(passage)
        if self._plain:
            passage.hidden_BTD.copy_(self._run(passage, torch.zeros_like(passage.hidden_BTD)))
            assert self._inputs is not None, "the layer has called its FFN"
            return self._inputs
        passage.computed = {}
        with self._recording(passage.computed, keep):
            try:
                self._run(passage, None)
            except _Reached:
                assert self._inputs is not None, "the FFN was called"
                return self._inputs
        raise CheckpointError("the layer does not call its FFN", where=f"layer {self._index}")

    @torch.no_grad()
    def add(self, passage: Passage, real_t: Int[Tensor, "t"], output_tD: Float[Tensor, "t D"]) -> None:
        """Go on with the FFN's output for the tokens `real_t` of the flattened batch; other tokens are padding."""
        rows_PD = passage.hidden_BTD.flatten(0, 1)
        if self._plain:
            rows_PD[real_t] = rows_PD[real_t] + output_tD
            passage.call = None
            return
        output_PD = torch.zeros_like(rows_PD)
        output_PD[real_t] = output_tD
        with self._replaying(passage.computed):
            passage.hidden_BTD.copy_(self._run(passage, output_PD.view_as(passage.hidden_BTD)))
        passage.computed, passage.call = {}, None

    def _is_plain(self, passage: Passage) -> bool:
        """Whether the layer's output is a residual plus its FFN's output, by the layer's own numbers.

        Norms, factors or modules after the FFN make it another function.
        """
        handed = {key: dict(value) for key, value in passage.handed.items()}
        # Keys that an earlier layer hands on are of the whole batch.
        rows, tokens = passage.ids_BT.shape if any(handed.values()) else (1, 8)
        few = Passage(passage.ids_BT[:rows, :tokens], passage.hidden_BTD[:rows, :tokens].clone(), handed)
        zero = torch.zeros_like(few.hidden_BTD)
        residual = self._run(few, zero)
        drawn = torch.randn(zero.shape, generator=torch.Generator().manual_seed(0)).to(zero)
        for size in (1.0, 3.0):
            output = drawn * residual.abs().max() * size
            change = self._run(few, output) - residual
            if not torch.allclose(change, output, rtol=1e-4, atol=1e-5 * float(output.abs().max())):
                return False
        return True

    @contextmanager
    def _recording(self, computed: dict[str, list[Any]], keep: Keep) -> Iterator[None]:
        def note(name: str, _module: nn.Module, _args: object, output: Any) -> None:  # noqa: ANN401
            if isinstance(output, tuple):
                # Attention weights are large, and layers only return them.
                first, *others = output
                small = (None if isinstance(part, Tensor) and part.ndim > 3 else part for part in others)
                kept: Any = (keep(first), *small)
            else:
                kept = keep(output) if isinstance(output, Tensor) else output
            computed.setdefault(name, []).append(kept)

        with ExitStack() as hooks:
            for name, child in self._parts.items():
                hooks.enter_context(child.register_forward_hook(partial(note, name)))
            yield

    @contextmanager
    def _replaying(self, computed: dict[str, list[Any]]) -> Iterator[None]:
        once = {name: outputs[0] for name, outputs in computed.items() if len(outputs) == 1}
        for name, output in once.items():
            self._parts[name].forward = lambda *_args, _output=output, **_arguments: _output
        try:
            yield
        finally:
            for name in once:
                del self._parts[name].forward


# What a decoder layer of some family returns.
_RETURNED: tuple[Callable[[Tensor], Any], ...] = (
    lambda hidden: hidden, lambda hidden: (hidden,), lambda hidden: (hidden, None), lambda hidden: (hidden, None, None),
)  # fmt: skip


class LayerStream(AbstractContextManager["LayerStream"]):
    """The layers, embedding and head of one checkpoint."""

    def __init__(self, folder: Path, *, device: torch.device) -> None:
        """Read the configuration and what is around the layers; a layer's weights are read when it runs, in fp32.

        Raises CheckpointError: the model computes between its layers.
        """
        self.device, self.reader = device, DenseReader(folder)
        try:
            self._open(folder)
        except BaseException:
            self.reader.close()
            raise

    def _open(self, folder: Path) -> None:
        decoder = self.reader.decoder
        with explained_loading(folder), init_empty_weights(include_buffers=False):
            self.config = AutoConfig.from_pretrained(folder, local_files_only=True)
            kind = model_class(self.config)
            self._model: PreTrainedModel = kind._from_config(self.config, dtype=torch.float32).eval()
        self.depth = decoder.depth  # L
        self._layers = [*self._model.get_submodule(decoder.layers)]
        self._load_frame()
        self._calls: list[Call | None] = [None] * self.depth
        self._arguments: OrderedDict[tuple[int, ...], list[Call]] = OrderedDict()
        self._ids: tuple[Tensor, Tensor]  # of the pass, on the device and on the host
        self._goes_on: Tensor | None = None  # hidden states with which the pass goes on behind the last layer
        self._returned = _RETURNED[0]
        for index, layer in enumerate(self._layers):
            layer.forward = partial(self._stand_in, index)
        self._by_ids, self._handed = self._learn()

    def __exit__(self, *_error: object) -> None:
        self.reader.close()

    def _load_frame(self) -> None:
        """Load what is around the layers, without the head, the large embeddings, and towers of images and sound."""
        decoder, model = self.reader.decoder, self._model
        around = model.get_submodule(decoder.layers.rpartition(".")[0])
        towers = [
            f"{name}."
            for name, module in model.named_modules()
            if name and isinstance(module, PreTrainedModel)
            and not any(part is around for part in module.modules())
            and not any(part is module for part in around.modules())
        ]  # fmt: skip
        lazy = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and module.num_embeddings >= _LAZY_ROWS
        }
        left_out = (f"{decoder.layers}.", *towers)
        for name in decoder.frame_names:
            if name == decoder.head or name in lazy or name.startswith(left_out):
                continue
            _put(model, name, self._tensor(name))
        for name, module in lazy.items():
            if name in decoder.stored and not name.startswith(left_out):
                # Some models look at its device.
                one_row = torch.empty(1, module.embedding_dim, device=self.device)
                module.weight = nn.Parameter(one_row, requires_grad=False)
                module.padding_idx = None  # it may be no row of those in use; it only matters for gradients
                module.register_forward_pre_hook(self._rows_of(name))
        for name, module in model.named_modules():
            if not f"{name}.".startswith(left_out):
                _move_buffers(module, self.device, recurse=False)
        # Wrappers ask for the device of their first parameter, which may be a tower's.
        name, parameter = next(model.named_parameters())
        if parameter.device.type == "meta":
            _put(model, name, torch.empty_like(parameter, device=self.device))

    def _rows_of(self, name: str) -> Callable[[nn.Embedding, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        table: list[Tensor] = []

        def use(module: nn.Embedding, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if not table:
                table.append(self.reader.tensor(name))
            # Only the rows in use are cast and moved.
            ids = self._ids[1] if args[0] is self._ids[0] else args[0].cpu()  # for which the host would wait
            used, rows = torch.unique(ids, return_inverse=True)
            module.weight = nn.Parameter(table[0][used].to(self.device, torch.float32), requires_grad=False)
            return (rows.to(self.device), *args[1:])

        return use

    def _stand_in(self, index: int, *args: Any, **arguments: Any) -> Any:  # noqa: ANN401 - differs by family
        """Take the place of a layer: keep its arguments, and return its input."""
        if self._calls[index]:
            what = "the model runs its layers several times, and neurons are chosen for one pass"
            raise CheckpointError(what, where=self.reader.decoder.model_class, do="choose another dense decoder")
        self._calls[index] = (args, arguments)
        hidden = _hidden((args, arguments))
        if index == self.depth - 1:
            if self._goes_on is None:
                raise _Reached
            hidden = self._goes_on
        return self._returned(hidden)

    @torch.no_grad()
    def _pass(self, ids_BT: Tensor, goes_on: Tensor | None = None) -> Any:  # noqa: ANN401 - the model's output
        """A pass through what is around the layers; ends at the last layer, or goes on with these hidden states."""
        self._calls, self._goes_on = [None] * self.depth, goes_on
        try:
            self._ids = ids_BT.to(self.device), ids_BT
            return self._model(input_ids=self._ids[0], use_cache=False)
        except _Reached:
            return None
        finally:
            self._goes_on = None

    def _learn(self) -> tuple[bool, set[str]]:
        """Whether arguments of layers depend on token ids, and which of them layers hand on to later ones.

        Raises CheckpointError: the model computes between its layers, or does not run each of them once.
        """
        problem: Exception | None = None
        ids = torch.tensor([[1, 2, 3], [3, 1, 2]])
        for returned in _RETURNED:
            self._returned = returned
            try:
                self._pass(ids)
                hidden = [_hidden(call) for call in self._calls if call]
                if all(isinstance(states, Tensor) and states.shape == hidden[0].shape for states in hidden):
                    break
            except CheckpointError:
                raise
            except Exception as error:  # noqa: BLE001 - code of any family
                problem = error
        else:
            what = f"no way to stand in for a layer: {type(problem).__name__}: {str(problem)[:100]}"
            raise CheckpointError(what, where=self.reader.decoder.model_class) from problem
        if hidden[0].ndim != 3:
            what = "its layers pass on several hidden states of a token, and one is carved"
            raise CheckpointError(what, where=self.reader.decoder.model_class)
        if len(hidden) < self.depth or any(not torch.equal(states, hidden[0]) for states in hidden):
            what = "the model computes between its layers, or does not run all of them in order"
            raise CheckpointError(what, where=self.reader.decoder.model_class, do="choose another dense decoder")
        first = [call for call in self._calls if call]
        # What is behind the last layer may be the first one again; the head has no weights yet.
        with self._model.get_output_embeddings().register_forward_pre_hook(_reached):
            self._pass(ids, hidden[0])
        self._pass(torch.tensor([[4, 3, 1], [2, 2, 5]]))
        second = [call for call in self._calls if call]
        by_ids, mappings = False, dict[str, set[int]]()
        for one, other in zip(first, second, strict=True):
            tensors = [[*find_tensors(_without_hidden(call)).values()] for call in (one, other)]
            by_ids |= len(tensors[0]) != len(tensors[1]) or not all(map(torch.equal, *tensors))
            for key, value in one[1].items():
                if isinstance(value, MutableMapping):
                    mappings.setdefault(key, set()).add(id(value))
        return by_ids, {key for key, found in mappings.items() if len(found) == 1 < self.depth}

    def embed(self, batches: Iterable[Int[Tensor, "B T"]]) -> Iterator[Passage]:
        """The batches before the first layer; B and T differ from batch to batch."""
        for ids_BT in batches:
            self._pass(ids_BT)
            call = self._calls[0]
            assert call is not None, "`_learn` has checked it"
            yield Passage(ids_BT, _hidden(call), {key: call[1][key] for key in self._handed})

    def arguments(self, index: int, passage: Passage) -> Call:
        """A layer's arguments for this batch; hidden states among them are to be replaced."""
        shape = tuple(passage.ids_BT.shape)
        if self._by_ids:
            if passage.call is None:
                self._pass(passage.ids_BT)
                call = self._calls[index]
                assert call is not None, "`_learn` has checked it"
                args, arguments = _without_hidden(call)
                passage.call = tuple(map(_own, args)), {key: _own(value) for key, value in arguments.items()}
            return passage.call[0], {**passage.call[1], **passage.handed}
        if shape not in self._arguments:
            self._pass(passage.ids_BT)
            self._arguments[shape] = [_without_hidden(call) for call in self._calls if call]
            if len(self._arguments) > _SHAPES_KEPT:
                self._arguments.popitem(last=False)
        args, arguments = self._arguments[shape][index]
        return args, {**arguments, **passage.handed}

    def layers(self) -> Iterator[StreamLayer]:
        """Yield every decoder layer in order and free the previous one."""
        decoder = self.reader.decoder
        for index, (weights, ffn) in fetch_ahead(self._read_layer, range(self.depth), self.device):
            module, prefix = self._layers[index], f"{decoder.layers}.{index}."
            for name, tensor in weights.items():
                _put(module, name.removeprefix(prefix), send(tensor, self.device, torch.float32))
            _move_buffers(module, self.device, recurse=True)
            has_ffn = decoder.has_ffn(index)
            made = [self._ffn(module if has_ffn else None, ffn)]
            del weights, ffn
            # Only the caller holds the FFN, and may delete it from the layer.
            yield StreamLayer(self, index, module, made.pop())
            if has_ffn:
                del module.get_submodule(decoder.ffn.path).forward  # it holds the StreamLayer, and so the FFN
            for name, parameter in [*module.named_parameters()]:
                # The FFN outlives this layer, and its activation may have weights.
                if not (has_ffn and name.startswith(f"{decoder.ffn.path}.")):
                    _put(module, name, torch.empty_like(parameter, device="meta"))

    def _read_layer(self, index: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        """A layer's tensors without the FFN, and its gate, up and down, as stored."""
        names = self.reader.decoder.layer_names(index)
        weights = {name: pinned(self.reader.tensor(name), self.device) for name in names}
        return weights, [pinned(weight, self.device) for weight in self.reader.projections(index)]

    def head(self) -> Callable[[Passage], Float[Tensor, "B T V"]]:
        """What is behind the last layer, as a function from a batch to its logits."""
        decoder = self.reader.decoder
        name = decoder.head if decoder.head in decoder.stored else decoder.embedding
        _put(self._model, decoder.head, self._tensor(name))

        def logits(passage: Passage) -> Tensor:
            found: Tensor = self._pass(passage.ids_BT, passage.hidden_BTD).logits
            return found

        return logits

    def _ffn(self, module: nn.Module | None, projections: Sequence[Tensor]) -> DenseFFN:
        plan = self.reader.decoder.ffn
        gate_FD, up_FD, down_DF = (send(tensor, self.device, torch.float32) for tensor in projections)
        act = nn.Identity() if module is None else find_activation(plan.act, module.get_submodule(plan.path))
        return DenseFFN(gate_FD, up_FD, down_DF, act)

    def _tensor(self, name: str) -> Tensor:
        return send(self.reader.tensor(name), self.device, torch.float32)


def _reached(*_args: object) -> None:
    raise _Reached


def _hidden(call: Call) -> Tensor:
    hidden: Tensor = call[0][0] if call[0] else call[1]["hidden_states"]
    return hidden


def _without_hidden(call: Call) -> Call:
    args, arguments = call
    others = {key: value for key, value in arguments.items() if key != "hidden_states"}
    return ((None, *args[1:]) if args else args), others


def _own(value: Any) -> Any:  # noqa: ANN401 - an argument of any kind
    """A copy of a tensor that is a part of another, such as that of all layers, which it would keep in memory."""
    is_part = isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if is_part else value


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Give a parameter or buffer of this name another tensor."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._buffers:
        owner._buffers[leaf] = tensor
    else:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def _move_buffers(module: nn.Module, device: torch.device, *, recurse: bool) -> None:
    for part in module.modules() if recurse else (module,):
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
