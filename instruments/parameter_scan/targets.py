"""The watched weights of a model, and the record of their norms."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from instruments.errors import ConfigError, some
from instruments.hooks import plain_name, unwrap
from instruments.parameter_scan.file_format import ScannedSequence, WatchedParameter
from instruments.transformers_layers import conv1d_kind, fused_parameters

logger = logging.getLogger(__name__)


def refusal(what: str, do: str) -> ConfigError:
    """The error of a request that the scanner cannot fulfil."""
    return ConfigError(what, where="ParameterTensorScanner", do=do)


@dataclass(frozen=True)
class ScanRecord:
    """L2 norms of B samples for P parameters, float32 on the CPU.

    Columns of (B, P) follow the parameter table; (B, I) and (B, O) hold the input and output blocks of all parameters,
    concatenated. Values that were not measured are NaN (a forward-only pass has no gradient).
    """

    sequences: Sequence[ScannedSequence]
    # In the order of the file's ARRAYS.
    activation_BP: Tensor  # ‖X‖ of the module's input over the sample's tokens; embedding: of the rows looked up
    gradient_BP: Tensor  # ‖∂loss/∂W‖
    in_activation_BI: Tensor  # ‖X[:, block]‖
    in_gradient_BI: Tensor  # ‖∂loss/∂W[:, block]‖
    out_gradient_BO: Tensor  # ‖∂loss/∂W[block, :]‖


@dataclass(frozen=True, eq=False)
class Target:
    """A module, and the watched weight that it uses: one parameter, or one per expert of a fused weight."""

    column: int  # of the first parameter in the parameter table
    parameters: Sequence[WatchedParameter]
    module: nn.Module
    head: nn.Linear | None = None  # for an embedding: the Linear with the same weight (tied output embedding)
    fused: str = ""  # for fused experts: the module's attribute
    is_output: bool = False  # it is the output embedding, which may get only the last positions

    @property
    def parameter(self) -> WatchedParameter:
        """The first; those of fused experts differ only in their names."""
        return self.parameters[0]

    @property
    def columns(self) -> range:
        """Columns in the parameter table."""
        return range(self.column, self.column + len(self.parameters))

    @property
    def label(self) -> str:
        """The name in `left_out`, where fused experts are listed together."""
        return self.parameter.name + (" and the other experts" if self.fused else "")


class Selection:
    """The targets of a model (embeddings, then all other layers, in the model's order), and the weights left out."""

    def __init__(self, model: nn.Module, patterns: Sequence[str] | None, block_width: int) -> None:
        """Select every embedding, Linear, Conv1D and fused expert, or those whose module or parameter a glob matches.

        Subclasses count, including those of bitsandbytes. Raises ConfigError: nothing that can be scanned matches, or
        `block_width` is below 1.
        """
        if block_width < 1:
            raise refusal(f"block_width={block_width} is below 1", "block_width=64")
        self.targets: list[Target] = []
        self.left_out: dict[str, str] = {}  # name of a weight or module → reason
        self._model, self._patterns, self._width = unwrap(model), patterns, block_width
        self._modules = {plain_name(name): module for name, module in self._model.named_modules()}
        embeddings = [name for name, module in self._modules.items() if isinstance(module, nn.Embedding)]
        linears = [n for n, m in self._modules.items() if isinstance(m, (nn.Linear, conv1d_kind()))]
        users: dict[int, list[str]] = {}  # weight → its modules
        for name in (*embeddings, *linears):
            users.setdefault(self._key(self._modules[name]), []).append(name)
        by_first = {names[0]: names for names in users.values()}
        self._heads = find_head_widths(self._modules)
        outputs = (getattr(one, "get_output_embeddings", lambda: None)() for one in self._modules.values())
        self._outputs = {part for head in outputs if isinstance(head, nn.Module) for part in head.modules()}
        for name in dict.fromkeys((*embeddings, *self._modules)):
            self._add_weight(by_first.get(name, []))
            for fused in fused_parameters(self._modules[name]):
                if self._wanted(f"{name}.{fused}"):
                    self._add_experts(name, self._modules[name], fused)
        if patterns is None:
            self._leave_others_out(users.keys())
        if not self.targets:
            kinds = sorted({name.rpartition(".")[2] for name in linears})
            why = some(f"{name}: {why}" for name, why in self.left_out.items()) or f"its Linear layers are {kinds}"
            do = f"patterns=['*{kinds[0]}']" if kinds else "scan a model with nn.Linear layers"
            raise refusal(f"no parameter can be scanned by patterns={patterns}; {why}", do)
        warn_left_out(self.left_out)

    def _wanted(self, name: str) -> bool:
        return self._patterns is None or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def _add(self, parameters: Sequence[WatchedParameter], module: nn.Module, **more: Any) -> None:  # noqa: ANN401 - fields of Target
        column = self.targets[-1].columns.stop if self.targets else 0
        self.targets.append(Target(column, parameters, module, **more))

    def _key(self, module: Any) -> int:  # noqa: ANN401 - a Linear, Conv1D or embedding
        """Identity of its weight."""
        weight, model = stored_weight(module), self._model
        # Offloading gives every module its own placeholder; only the config shows the tie.
        if weight.is_meta and module is getattr(model, "get_output_embeddings", lambda: None)():
            config: Any = getattr(model, "config", None)
            if config and config.get_text_config().tie_word_embeddings:
                weight = stored_weight(model.get_input_embeddings())  # type: ignore[operator]
        return id(weight)

    def _add_weight(self, names: Sequence[str]) -> None:
        """A weight of these modules: an embedding, which one Linear may share, or a Linear or Conv1D."""
        if not (wanted := [name for name in names if self._wanted(name)]):
            return
        name, module, *others = names[0], *(self._modules[one] for one in names)
        embedding = isinstance(module, nn.Embedding)
        tied = embedding and len(others) == 1 and not isinstance(others[0], nn.Embedding)
        if embedding and name not in wanted:
            why = f"it shares its weight with {name}, whose gradient is the sum of both uses; patterns=['{name}']"
        elif others and not tied:
            why = f"{some(names, 3, ', ')} share one weight"
        else:
            why, wanted = _unmeasured(module), [name]
        if why:
            self.left_out |= {f"{one}.weight": why for one in wanted}
            return
        kind = "embedding" if embedding else "linear"
        parameter = WatchedParameter(f"{name}.weight", kind, *_features(module), self._width)
        if name in self._heads and not embedding:
            parameter = _cut_by_heads(parameter, *self._heads[name])
        self._add([parameter], module, head=others[0] if tied else None, is_output=module in self._outputs)

    def _add_experts(self, name: str, module: nn.Module, fused: str) -> None:
        weight: Tensor = getattr(module, fused)
        if getattr(module, "has_bias", False) or hasattr(module, f"{fused}_bias"):
            self.left_out[f"{name}.{fused}"] = "the experts' biases are added in place"
            return
        outputs, inputs = weight.shape[1:] if not module.is_transposed else weight.shape[:0:-1]
        names = (f"{name}.{expert}.{fused}" for expert in range(len(weight)))
        parameters = [WatchedParameter(own, "linear", inputs, outputs, self._width) for own in names]
        self._add(parameters, module, fused=fused)

    def _leave_others_out(self, known: Iterable[int]) -> None:
        """Note the model's weight matrices of other modules than those of the weights `known`, and of fused experts."""
        seen = {*known}
        for target in self.targets:
            seen |= {id(weight) for weight in getattr(target.module, "parametrizations", nn.Module()).parameters()}
            if target.fused:
                seen.add(id(getattr(target.module, target.fused)))
        for name, weight in ((plain_name(name), weight) for name, weight in self._model.named_parameters()):
            if weight.ndim >= 2 and id(weight) not in seen and name not in self.left_out:
                kind = type(self._modules[name.rpartition(".")[0]]).__name__
                self.left_out[name] = f"{kind} is no Linear, Conv1D or embedding"


def _unmeasured(module: nn.Module) -> str:
    """Why the norms of a Linear's or embedding's weight would be wrong; empty if they are not."""
    weight, forward = stored_weight(module), type(module).forward
    if weight.is_complex():
        return "complex weights are not measured"
    if getattr(module, "scale_grad_by_freq", False):
        return "scale_grad_by_freq mixes the gradients of samples"
    # Those of bitsandbytes, and of other packed weights, compute the same as a Linear.
    known = forward.__module__.startswith("bitsandbytes.") or weight.element_size() == 1
    plain = forward in {nn.Linear.forward, getattr(conv1d_kind(), "forward", None)}
    return "" if isinstance(module, nn.Embedding) or known or plain else "its class has a forward of its own"


def stored_weight(module: Any) -> Tensor:  # noqa: ANN401 - a Linear, Conv1D or embedding
    """The weight; of a parametrized one, a tensor it is computed from: reading it would run the parametrization."""
    if not is_parametrized(module, "weight"):
        weight: Tensor = module.weight
        return weight
    originals: list[Tensor] = list(module.parametrizations.weight.parameters(recurse=False))
    return originals[-1]  # weight_norm's second is the direction


def warn_left_out(left_out: Mapping[str, str]) -> None:
    """Log one line, if any are left out: number and names of the weights, and the reasons."""
    names: dict[str, list[str]] = {}
    for name, why in left_out.items():
        names.setdefault(why, []).append(name)
    if names:
        reasons = "; ".join(f"{some(named, 3, ', ')} ({why})" for why, named in names.items())
        logger.warning("parameter scan: %d weights are left out: %s", len(left_out), reasons)


# Names in transformers' attention modules: the width of a head, and output projections.
_HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "out_lin", "o", "wo", "proj")


def find_head_widths(modules: Mapping[str, nn.Module]) -> dict[str, tuple[str, int]]:
    """Name of each attention layer → the side whose features are heads (`in` or `out`), and the width of a head."""
    found: dict[str, tuple[str, int]] = {}
    for name, module in modules.items():
        widths = [value for own in _HEAD_WIDTHS if isinstance(value := getattr(module, own, None), int) and value > 0]
        if not widths or not any(isinstance(child, (nn.Linear, conv1d_kind())) for child in module.children()):
            continue
        # In BERT the head width is in attention.self and the output projection in attention.output.
        around = name.rpartition(".")[0]
        scope = around if around.rpartition(".")[2] in {"attention", "attn"} else name
        for other in modules:
            if other.startswith(f"{scope}."):
                found[other] = ("in" if other.rpartition(".")[2] in _OUTPUTS else "out", widths[0])
    return found


def _cut_by_heads(parameter: WatchedParameter, side: str, width: int) -> WatchedParameter:
    if getattr(parameter, f"{side}_features") % width:
        return parameter
    return replace(parameter, in_head=width) if side == "in" else replace(parameter, out_head=width)


def _features(module: Any) -> tuple[int, int]:  # noqa: ANN401 - a Linear, Conv1D or embedding
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    inputs, outputs = stored_weight(module).shape
    return inputs, outputs
