"""One step's numbers: gathered on the device, brought over at once, put into words."""

import logging
import math
from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from models.numerics.watch.anomalies import StepReport
from models.numerics.watch.config import WatchConfig
from models.numerics.watch.gradients import gradient_norms, layer_of, refuse_flat_shards
from models.numerics.watch.loss_scale import check_loss_scale
from models.numerics.watch.outputs import OutputWatch, Peak
from models.numerics.watch.verdict import Numbers, Output, judge

logger = logging.getLogger(__name__)


def find_trainable(model: nn.Module, optimizer: Optimizer | None) -> dict[str, nn.Parameter]:
    """Parameters that ask for a gradient, by name; with an optimizer, those it has."""
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if optimizer is None:
        return own
    asked = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    strangers = len(asked - {id(parameter) for parameter in own.values()})
    if strangers:
        logger.warning("%d parameters of the optimizer are none that the model trains: not watched", strangers)
    return {name: parameter for name, parameter in own.items() if id(parameter) in asked}


class Measurement:
    """What is looked at, and the loss scales so far."""

    def __init__(self, model: nn.Module, trainable: dict[str, nn.Parameter], config: WatchConfig) -> None:
        """Put hooks on the modules where outputs are wanted."""
        refuse_flat_shards(model)
        self.config = config
        self.parameters = trainable
        self.device = next((p.device for p in [*trainable.values(), *model.parameters()]), torch.device("cpu"))
        self.outputs = OutputWatch(model) if config.activations else None
        self.scales: list[float] = []
        self._order: dict[str, int] = {}  # of modules, as they first ran

    def remove(self) -> None:
        """Take the hooks off."""
        if self.outputs is not None:
            self.outputs.remove()

    @torch.no_grad()
    def read(
        self, step: int, loss: Tensor | float | None, scaler: GradScaler | None, factor: Tensor | None
    ) -> StepReport:
        """The report of a step, whose gradients are to be multiplied by `factor`; one transfer from the device."""
        peaks = self.outputs.take() if self.outputs is not None else []
        norms_P = gradient_norms(list(self.parameters.values())) if self.parameters else torch.zeros(0)
        scale = scaler.scale(torch.ones((), device=self.device)) if scaler is not None else None
        singles = [torch.as_tensor(math.nan if one is None else one) for one in (loss, scale, factor)]
        parts = [norms_P, *singles, *(peak.value for peak in peaks)]
        numbers = torch.cat([part.detach().float().reshape(-1).to(self.device) for part in parts]).tolist()
        count = len(self.parameters)
        loss_value, scale_value, factor_value = numbers[count : count + 3]
        layers, lost = self._by_layer(numbers[:count], 1.0 if factor is None else factor_value, peaks)
        outputs = [Output(p.module, p.dtype, value) for p, value in zip(peaks, numbers[count + 3 :], strict=True)]
        known = None if loss is None else loss_value
        found = judge(Numbers(known, layers, lost, outputs, scaler is not None), self.config)
        if scaler is not None:
            found += check_loss_scale(scale_value, self.scales, self.config)
            self.scales = [*self.scales[-self.config.falls :], scale_value]
        largest = max(outputs, key=lambda output: (math.isnan(output.value), output.value), default=None)
        return StepReport(
            step, known, math.hypot(*layers.values()), None if scaler is None else scale_value, layers,
            None if largest is None else (largest.module, largest.value), tuple(found),
        )  # fmt: skip

    def _by_layer(self, norms: list[float], factor: float, peaks: list[Peak]) -> tuple[dict[str, float], list[str]]:
        """Norms of layers that have a gradient, in the order they run; and those that hold NaN or inf."""
        for peak in peaks if not self._order else []:
            self._order.setdefault(peak.module, len(self._order))
        squares: dict[str, float] = defaultdict(float)
        lost = set()
        for (name, parameter), norm in zip(self.parameters.items(), norms, strict=True):
            layer = layer_of(name)
            if norm >= 0 or math.isnan(norm):
                squares[layer] += (norm * factor) ** 2
            if not math.isfinite(norm) and not _is_finite(parameter):
                lost.add(layer)
        last = len(self._order)
        # Those whose outputs are not seen (they have modules inside) stay where the model names them: at the end.
        ordered = sorted(squares, key=lambda layer: self._order.get(layer, last))
        return {layer: math.sqrt(squares[layer]) for layer in ordered}, [layer for layer in ordered if layer in lost]


def _is_finite(parameter: nn.Parameter) -> bool:
    """Whether only the norm overflowed."""
    assert parameter.grad is not None, "it had a norm"
    values = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return bool(values.isfinite().all())
