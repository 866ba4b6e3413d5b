"""Find a dense decoder by structure: no table of families, only transformers' own classes.

The model is built without weights. In each decoder layer, a module with three matrices of matching sizes (or two, of
which one holds gate and up) is a candidate for the FFN. A small copy with random weights is called once, and **proves
by numbers** that it is down(act(gate(x)) · up(x)). Everything else in the layer is transformers' own code.
"""

import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.activations import ACT2FN
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, rename_source_key

from instruments.errors import CheckpointError, first_line
from models.checkpoint.folder import read_checkpoint
from models.decoder import Decoder, FFNPlan, Rows
from models.source import read_config
from models.tiny_onn.sparse_ffn import find_activation

# Where config.json has the sizes of the text part: in its own object, or (as in Qwen2-VL) at the top.
_TEXT_SIZES = ("text_config", "decoder", "generator", "hidden_size")
_NO_DECODER = "an encoder-decoder is no model of the next token alone"
_OTHER = "choose a dense decoder whose FFN is down(act(gate(x)) * up(x))"
# Activations that models call as functions, by their names in transformers.
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")


class _Refused(Exception):  # noqa: N818 - a finding
    """Why this module is no FFN that can be cut into experts."""


def describe(folder: Path, *, weights: bool) -> Decoder:
    """The dense decoder in a checkpoint folder. Raises CheckpointError: it has none, with the reason."""
    where, said = str(folder / "config.json"), read_config(folder)
    try:
        # Without an answer to `trust_remote_code`, transformers asks for one on the terminal.
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if getattr(config, "is_encoder_decoder", False):
            raise _error(_NO_DECODER, where)
        model = build_empty(config)
    except CheckpointError:
        raise
    except Exception as error:  # the file is untrusted, and transformers' classes raise errors of any type
        if said.get("auto_map") and said.get("model_type") not in CONFIG_MAPPING:
            what = "the model exists only as Python code in the checkpoint (auto_map), which is not run"
            raise CheckpointError(what, where=where, do="choose a model that transformers has a class for") from error
        what = f"transformers {transformers.__version__} cannot make a model of config.json: {first_line(error)}"
        do = f"{_OTHER}, or pip install -U transformers if the model is newer"
        raise CheckpointError(what, where=where, do=do) from error
    names = {name: tuple(entry.shape) for name, entry in read_checkpoint(folder).items()} if weights else {}
    return describe_model(model, said, names)


def build_empty(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration on the meta device, in fp32."""
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config)._from_config(copy.deepcopy(config), dtype=torch.float32)
    return model.eval()


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that wrote the checkpoint, by `architectures`; else transformers' class for text, or images and text.

    AutoModelForCausalLM alone would leave out the vision tower of some wrappers. Raises CheckpointError: there is none.
    """
    thinker = getattr(config, "thinker_config", None)  # of Qwen Omni: what reads, hears, sees and writes text
    if type(thinker) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(thinker)].__name__
        what = "the model also speaks, and only the part that writes text is carved"
        do = f"save that part, and carve it: {name}.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        raise CheckpointError(what, where="thinker_config in config.json", do=do)
    for name in config.architectures or ():
        found: Any = getattr(transformers, str(name), None)
        # A configuration may be read as that of another family, such as Mistral's with windows as Ministral's.
        if getattr(found, "config_class", None) is type(config) and found.can_generate():
            chosen: type[PreTrainedModel] = found
            return chosen
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            known: type[PreTrainedModel] = mapping[type(config)]
            return known
    what = f"a model of type {config.model_type} has no text decoder that predicts the next token"
    raise _error(what, "architectures and model_type in config.json")


def describe_model(model: PreTrainedModel, config: Mapping[str, Any], stored: Mapping[str, tuple[int, ...]]) -> Decoder:
    """The decoder of a model, which may be on the meta device.

    `config`: config.json; `stored`: shapes of the tensors on disk. Raises CheckpointError: it cannot be carved.
    """
    text = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise _error(_NO_DECODER, type(model).__name__)
    if text is not model.config and config and not any(config.get(key) for key in _TEXT_SIZES):
        raise _error("config.json of a model with several parts does not describe its text part", "text_config")
    layers, modules = decoder_layers(model)
    width = int(getattr(text, "hidden_size", 0) or 0)
    plan = _common_plan(modules, width)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(getattr(embedding, "weight", None), Tensor):
        raise _error("tokens are embedded by more than one table", type(model).__name__)
    if head is None:
        raise _error("the model has no output embedding", type(model).__name__)
    places = {id(module): name for name, module in model.named_modules()}
    tied = dict(model.all_tied_weights_keys)
    first = f"{places[id(embedding)]}.weight"
    last = f"{places[id(head)]}.weight"
    # A tensor that is another's alias has no place of its own, but a head is listed: a checkpoint may hold both.
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    resolved = json.loads(text.to_json_string(use_diff=False))
    given = config.get("text_config")
    given = given if isinstance(given, Mapping) else config
    for key, value in given.items():
        # What transformers makes of a null, or of an encoding without all its numbers, holds.
        if isinstance(value, Mapping) and isinstance(resolved.get(key), Mapping):
            resolved[key] |= {name: number for name, number in value.items() if name not in resolved[key]}
        elif value is not None:
            resolved[key] = value
    names, unknown = _stored_names(model, stored)
    return Decoder(
        model_class=type(model).__name__,
        model_type=str(text.model_type),
        config={**resolved, "hidden_act": plan[0].activation},
        config_json=dict(config),
        layers=layers,
        depth=len(modules),
        hidden=plan[1],
        vocabulary=int(embedding.weight.shape[0]),
        ffn=plan[0],
        embedding=first,
        head=last,
        tied=last in tied,
        shapes=shapes,
        stored=names,
        unknown=unknown,
    )


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and list of a model's decoder layers, of a dense model or an MoE. Raises CheckpointError: there is none."""
    text = model.config.get_text_config(decoder=True)
    depths = [getattr(text, key, None) for key in ("num_hidden_layers", "num_layers", "decoder_layers", "n_layer")]
    depth = next((number for number in depths if number), None)
    names = {id(module): name for name, module in model.named_modules()}
    for root in (model.get_decoder(), model.base_model):  # get_decoder may find an output head
        found = [
            (names[id(module)].count("."), names[id(module)], module)
            for module in root.modules()
            if isinstance(module, nn.ModuleList) and len(module) and depth in {None, len(module)}
        ]
        outer = [entry[1:] for entry in found if entry[0] == min(level for level, *_ in found)]
        if len(outer) > 1:  # some models keep lists of norms or of attention parts beside their layers
            outer = [entry for entry in outer if any(isinstance(part, nn.Linear) for part in entry[1].modules())]
        if len(outer) == 1:
            return outer[0]
        if outer:
            raise _error(f"several lists of layers: {', '.join(name for name, _ in outer)}", type(model).__name__)
    raise _error("no list of decoder layers", type(model).__name__)


_PLANS: dict[tuple[type, str], FFNPlan] = {}


def ffn_plan(model: PreTrainedModel) -> FFNPlan:
    """How the FFNs of a dense model in memory are made; a model of the same configuration is built without weights."""
    key = (type(model), model.config.to_json_string())
    if key not in _PLANS:
        with torch.device("meta"):
            empty = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.float32)
        _PLANS[key], _ = _common_plan(decoder_layers(empty)[1], empty.config.get_text_config(decoder=True).hidden_size)
    return _PLANS[key]


def _error(what: str, where: str) -> CheckpointError:
    return CheckpointError(what, where=where, do=_OTHER)


def _common_plan(layers: nn.ModuleList, hidden: int) -> tuple[FFNPlan, int]:
    """The FFN of all layers, at most as wide, and its input width. Raises CheckpointError: a layer has another."""
    reasons: dict[str, list[int]] = {}
    without: list[int] = []  # layers that are attention or Mamba alone, as in Nemotron-H
    plans: dict[tuple[FFNPlan, int], list[int]] = {}
    owners: dict[int, int] = {}
    known: dict[str, tuple[FFNPlan, int] | str | None] = {}
    for index, layer in enumerate(layers):
        text = _structure(layer)
        if text not in known:
            try:
                known[text] = _find_ffn(layer, hidden)
            except _Refused as why:
                known[text] = str(why)
        plan = known[text]
        if plan is None:
            without.append(index)
        elif isinstance(plan, str):
            reasons.setdefault(plan, []).append(index)
        elif (other := owners.setdefault(id(layer.get_submodule(plan[0].path)), index)) != index:
            reasons.setdefault(f"its FFN is that of layer {other}", []).append(index)
        else:
            plans.setdefault(plan, []).append(index)
    if without and not (plans or reasons):
        reasons["no FFN is found: no module of it has two or three Linear layers of matching sizes"] = without
    if reasons:
        reason, where = next(iter(reasons.items()))
        raise _error(reason, f"{_numbers(where)} of {len(layers)}")
    widest = max(plans, key=lambda found: found[0].width)
    if any((replace(plan, width=widest[0].width), width) != widest for plan, width in plans):
        apart = "; ".join(map(_numbers, plans.values()))
        raise _error("the layers' FFNs differ, and not by their width alone", f"{apart} of {len(layers)}")
    return widest


def _structure(layer: nn.Module) -> str:
    """What layers of equal structure share: modules, sizes, and numbers among their attributes but the layer's own."""
    numbers = [
        (key, value)
        for module in layer.modules()
        for key, value in vars(module).items()
        if isinstance(value, int | float | str) and "idx" not in key and "layer" not in key
    ]
    return f"{layer!r} {numbers}"


def _numbers(layers: list[int]) -> str:
    shown = ", ".join(map(str, layers[:4])) + (f" ... {layers[-1]}" if len(layers) > 5 else "")
    return f"layer{'s' * (len(layers) > 1)} {shown}"


def _find_ffn(layer: nn.Module, hidden: int) -> tuple[FFNPlan, int] | None:
    """The one FFN of a decoder layer, and its input width; None: nothing in it is like one. Raises _Refused."""
    if _is_mixture(layer, hidden):
        raise _Refused("the layer is a Mixture-of-Experts already")
    plans: list[tuple[FFNPlan, int]] = []
    reasons: list[str] = []
    for path, module in _candidates(layer, hidden):
        if any(path.startswith(f"{plan.path}.") for plan, _ in plans):
            continue
        try:
            try:
                plans.append(_plan_of(path, module, torch.float64))
            except RuntimeError:  # it computes in fp32 inside
                plans.append(_plan_of(path, module, torch.float32))
        except _Refused as why:
            reasons.append(str(why))
    # Two matrices beside an FFN with a gate are an adapter or the like.
    plans = [found for found in plans if found[0].is_gated] or plans
    if len(plans) > 1:
        raise _Refused(f"several FFNs in one layer: {', '.join(plan.path for plan, _ in plans)}")
    if not plans:
        own = {(part.in_features, part.out_features) for part in layer.children() if isinstance(part, nn.Linear)}
        if any((hidden, wide) in own and (wide, hidden) in own for _, wide in own if wide > hidden):
            raise _Refused("the FFN is written in the layer's own code, not in a module of its own")
        if reasons:
            likely = [why for why in reasons if "no function of one tensor" not in why] or reasons
            raise _Refused(f"no FFN is found: {'; '.join(likely[:2])}")
    return plans[0] if plans else None


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}


def _is_mixture(layer: nn.Module, hidden: int) -> bool:
    """Whether the layer holds experts: 3-D weights that read or write hidden states, or a list of FFNs."""
    for module in layer.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len(_linears(module[0])) >= 2:
            return True
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            continue
        if any(p.ndim == 3 and min(p.shape) > 1 and hidden in p.shape[1:] for p in module.parameters(recurse=False)):
            return True
    return False


def _candidates(layer: nn.Module, hidden: int) -> Iterator[tuple[str, nn.Module]]:
    """Modules with the matrices of an FFN and no other, outermost first: (D, F) twice or (D, 2F), and (F, D)."""
    for path, module in layer.named_modules():
        linears = _linears(module)
        if not path or len(linears) not in {2, 3} or isinstance(module, nn.ModuleList):
            continue
        own = {id(parameter) for part in linears.values() for parameter in part.parameters()}
        if any(parameter.ndim > 1 and id(parameter) not in own for parameter in module.parameters()):
            continue
        sizes = sorted((part.in_features, part.out_features) for part in linears.values())
        for read, written in {*sizes, *(size[::-1] for size in sizes)}:
            narrow, wide = (read, written // 2) if len(linears) == 2 else (read, written)
            fits = narrow == hidden if hidden else wide >= narrow
            wanted = [(read, written)] * (len(linears) - 1) + [(wide, narrow)]
            if fits and sizes in (sorted(wanted), sorted([(read, written), (written, read)])):
                yield path, module
                break


def _shrunk(ffn: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, int]:
    """A copy on the CPU with random weights, its sizes divided by a common divisor; and its input width."""
    small = copy.deepcopy(ffn)
    sizes = [size for part in _linears(ffn).values() for size in (part.in_features, part.out_features)]
    factor = max(1, math.gcd(*sizes) // 2)  # no size becomes 1
    for part in _linears(small).values():
        part.in_features, part.out_features = part.in_features // factor, part.out_features // factor
        part.weight = nn.Parameter(torch.empty(part.out_features, part.in_features, device="cpu", dtype=dtype))
        if part.bias is not None:
            part.bias = nn.Parameter(torch.empty(part.out_features, device="cpu", dtype=dtype))
    for module in small.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            # What is as long as a matrix, such as a norm's weight, is divided with it.
            shape = [size // factor if parameter.is_meta and size in sizes else size for size in parameter.shape]
            drawn = torch.empty(shape, dtype=dtype, device="cpu").uniform_(-1, 1)
            setattr(module, name, nn.Parameter(drawn))
        for name, buffer in [*module.named_buffers(recurse=False)]:
            ones = torch.ones(buffer.shape, device="cpu", dtype=buffer.dtype)
            module.register_buffer(name, ones, persistent=False)
    return small.eval(), next(iter(_linears(small).values())).in_features


def _ratio(a: Tensor, b: Tensor) -> float | None:
    """C with a = c · b; None if there is none."""
    if a.shape != b.shape or not bool(b.abs().max() > 0):
        return None
    c, close = float((a * b).sum() / (b * b).sum()), 1e-9 if a.dtype == torch.float64 else 1e-4
    if not math.isfinite(c) or c == 0 or not torch.allclose(a, c * b, rtol=close, atol=close * float(a.abs().max())):
        return None
    return 1.0 if abs(c - 1) < close / 10 else c


@dataclass(frozen=True)
class _Call:
    """One call of a part of an FFN: its name, what it read and what it wrote."""

    name: str
    read: Tensor
    written: Tensor


@torch.no_grad()
def _plan_of(path: str, module: nn.Module, dtype: torch.dtype) -> tuple[FFNPlan, int]:
    """The plan of this module, and its input width. Raises _Refused: it computes something else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small, hidden = _shrunk(module, dtype)
        x_TD, again_TD = torch.randn(6, hidden, dtype=dtype), torch.randn(5, hidden, dtype=dtype)
    linears = _linears(small)
    out, calls = _watched(path, small, x_TD, dtype)
    order = [call for call in calls if call.name in linears]
    if sorted(call.name for call in order) != sorted(linears):
        raise _Refused(f"{path} does not use each of its matrices once")
    *first, down = order
    if not down.read.any():  # random weights give each neuron about the same
        raise _Refused(f"{path}: its neurons depend on each other")
    if not all(call.read.numel() == x_TD.numel() and torch.equal(call.read.view_as(x_TD), x_TD) for call in first):
        raise _Refused(f"{path}: gate and up do not read the FFN's input unchanged")
    if (out_scale := _ratio(out.view_as(x_TD), down.written.reshape(x_TD.shape))) is None:
        raise _Refused(f"{path} changes its output after the last matrix")
    inner_TF = down.read.reshape(len(x_TD), -1)
    parts = dict(_read_rows(first, inner_TF.shape[1]))
    if not parts:
        raise _Refused(f"{path}: no matrix has the width that its last one reads")
    if any(part.bias is not None for part in linears.values()):
        raise _Refused(f"{path} has biases, which experts here do not have")
    functions = [call for call in calls if call.name not in linears]
    one, other = next(iter(parts)), [*parts][-1]
    # Without a gate both are the same matrix.
    for gate, up in ((one, other), (other, one)):
        found = _activation(parts[gate], inner_TF, parts[up], functions, gated=gate != up)
        if found is None:
            continue
        act, gate_scale, up_scale = found
        _check_activation(path, act, small, linears)
        real = _linears(module)[down.name]
        plan = FFNPlan(path, gate, up, down.name, act, "", real.in_features, gate_scale, up_scale * out_scale)
        _compare(plan, small, again_TD, "its neurons depend on each other")
        _compare(plan, small, 1e4 * again_TD, "its gate or up is limited")  # at 7 or 10, beyond usual values
        return replace(plan, activation=_name_of(act, find_activation(act.removeprefix("/"), small))), real.out_features
    raise _Refused(f"{path}: what its last matrix reads is not act(gate) * up")


def _compare(plan: FFNPlan, small: nn.Module, x_TD: Tensor, wrong: str) -> None:
    """Raise _Refused, with what is wrong, if the FFN does not give what its plan says."""
    linears, act = _linears(small), find_activation(plan.act, small)
    gate_FD, up_FD = (
        linears[rows.linear].weight[rows.of(len(linears[rows.linear].weight))] for rows in (plan.gate, plan.up)
    )
    inner_TF = act(plan.gate_scale * (x_TD @ gate_FD.T)) * (x_TD @ up_FD.T)
    expected = plan.down_scale * inner_TF @ linears[plan.down].weight.T
    close = 1e-9 if x_TD.dtype == torch.float64 else 1e-4
    near = close * max(1.0, float(expected.abs().max()))
    if not torch.allclose(expected, small(x_TD[None])[0], rtol=close, atol=near):
        raise _Refused(f"{plan.path}: {wrong}")


def _check_activation(path: str, place: str, ffn: nn.Module, linears: Mapping[str, nn.Linear]) -> None:
    """Raise _Refused: more than matrices and activation learns; without a gate, the activation is not 0 at 0."""
    own = {name for name, _ in ffn.named_parameters() if name.rpartition(".")[0] not in linears}
    if others := [name for name in own if name.partition(".")[0] != place.strip("/")]:
        raise _Refused(f"{path}.{min(others)} learns, and is neither in a matrix nor in the activation")
    if place.startswith("/") and find_activation(place[1:], ffn)(torch.zeros(1)).any():
        raise _Refused(f"{path} has no gate, and an activation that is not 0 at 0")


def _watched(path: str, ffn: nn.Module, x_TD: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[_Call]]:
    """The output for (2, T/2, D), and the calls of every Linear layer and of every part without one, in order.

    Raises _Refused: it is no function of one tensor; RuntimeError: it does not take float64.
    """
    linears, calls = _linears(ffn), list[_Call]()

    def note(name: str, _module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            calls.append(_Call(name, args[0], output))

    for name, part in ffn.named_modules():
        if name and (name in linears or not _linears(part)):
            part.register_forward_hook(partial(note, name))
    x_BTD = x_TD.view(2, -1, x_TD.shape[1])
    try:
        out = ffn(x_BTD)
    except Exception as error:
        if "ouble" in str(error) and dtype == torch.float64:
            raise RuntimeError(str(error)) from error
        raise _Refused(f"{path} is no function of one tensor ({type(error).__name__}: {str(error)[:80]})") from error
    if not isinstance(out, Tensor) or out.shape != x_BTD.shape:
        raise _Refused(f"{path} does not return a tensor of its input's shape")
    return out, calls


def _read_rows(calls: Iterable[_Call], width: int) -> Iterator[tuple[Rows, Tensor]]:
    """Gate and up (in an order not yet known): where they are stored, and their outputs."""
    for call in calls:
        output_TG = call.written.reshape(-1, call.written.shape[-1])
        if output_TG.shape[1] == width:
            yield Rows(call.name), output_TG
        elif output_TG.shape[1] == 2 * width:
            yield Rows(call.name, "first"), output_TG[:, :width]
            yield Rows(call.name, "second"), output_TG[:, width:]


def _activation(
    gate_TF: Tensor, inner_TF: Tensor, up_TF: Tensor, calls: list[_Call], *, gated: bool
) -> tuple[str, float, float] | None:
    """The activation by which inner = scale · act(gate_scale · gate) · up: its place, gate_scale and scale.

    Without a gate, inner = act(z) = act(z) / z · z, so that act's quotient is the activation, and gate and up are z.
    """
    named = [_Call(f":{name}", gate_TF, ACT2FN[name](gate_TF)) for name in _ACTIVATIONS]
    for call in [*calls, *named]:
        if call.read.numel() != gate_TF.numel() or call.written.numel() != gate_TF.numel():
            continue
        gate_scale = _ratio(call.read.reshape(gate_TF.shape), gate_TF)
        written_TF = call.written.reshape(gate_TF.shape)
        scale = _ratio(inner_TF, written_TF * up_TF if gated else written_TF)
        if gate_scale is not None and scale is not None:
            return (call.name, gate_scale, scale) if gated else (f"/{call.name}", gate_scale, scale * gate_scale)
    return None


def _name_of(place: str, act: Callable[[Tensor], Tensor]) -> str:
    """The name in ACT2FN of a function that gives the same numbers; else the module's class."""
    if place.startswith("/"):
        return f"{_name_of(place[1:], act)} without a gate"
    x = torch.linspace(-4, 4, 65)
    names: list[str] = [*_ACTIVATIONS, *ACT2FN]
    for name in names:
        with suppress(Exception):  # one of both may want another shape
            if torch.allclose(act(x), ACT2FN[name](x), rtol=0, atol=1e-6):
                return name
    return place.removeprefix(":") if place.startswith(":") else type(act).__name__


def _stored_names(
    model: PreTrainedModel, stored: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Tensor of the model → tensors on disk, as transformers' own loading matches them; and those that match none.

    Raises CheckpointError: transformers converts a tensor in another way than by concatenation.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    wanted, found = model.state_dict(), dict[str, list[str]]()
    unknown, joined = list[str](), {pattern: entry for entry in converters for pattern in entry.source_patterns}
    for name in stored:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target not in wanted:
            unknown.append(name)
            continue
        if pattern is not None and [type(step) for step in joined[pattern].operations] != [Concatenate]:
            known = type(model).__name__
            what = f"transformers converts {name} while it loads, and not by joining tensors"
            do = f"{known}.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER, save_original_format=False), carve that"
            raise CheckpointError(what, where=known, do=do)
        found.setdefault(target, []).append(name)
        if pattern is not None:  # in the converter's order
            places = {source: number for number, source in enumerate(joined[pattern].source_patterns)}
            found[target].sort(key=lambda part: min(n for source, n in places.items() if source in part))
    # Buffers of old checkpoints, and FP8 scales of the keys and values in a cache.
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq$"]
    ignored += [r"(?:^|\.)position_ids$"]
    ignored += [r"\.(?:[qkv]|kv|[kv]_proj\.output)_scale$"]
    return {name: tuple(parts) for name, parts in found.items()}, tuple(
        name for name in unknown if not any(re.search(pattern, name) for pattern in ignored)
    )
