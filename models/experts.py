"""Slice a layer's neurons into experts; one expert as a module; a layer of experts, as a loop or without one."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from instruments.device import is_launch_bound, prefers_large_products, rounded_products
from models.device import send
from models.ffn import gated
from models.routing import GateKind, LinearRouter, has_copies, relative_gates
from models.tiny_onn.sparse_ffn import TinyONNSharedFFN


@dataclass(frozen=True)
class ExpertWeights:
    """Unscaled slices of one layer's dense FFN."""

    gate_END: Float[Tensor, "E N D"]
    up_END: Float[Tensor, "E N D"]
    down_EDN: Float[Tensor, "E D N"]
    shared_gate_SD: Float[Tensor, "S D"]  # the always-on neurons
    shared_up_SD: Float[Tensor, "S D"]
    shared_down_DS: Float[Tensor, "D S"]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "ExpertWeights":
        """The same weights, contiguous, on a device and in a number format.

        On a GPU every down column is contiguous instead: without a loop, the columns of all experts are one matrix.
        """
        sent = ExpertWeights(**{name: send(tensor, device, dtype) for name, tensor in vars(self).items()})
        if not is_launch_bound(sent.down_EDN.device):
            return sent
        return replace(sent, down_EDN=sent.down_EDN.mT.contiguous().mT)


def slice_experts(
    projections: Iterable[Tensor], neurons_EN: Int[Tensor, "E N"], always_S: Int[Tensor, "S"]
) -> ExpertWeights:
    """Copy rows of gate and up and columns of down, bit for bit. Memory: one projection at a time, and the slices."""
    projections = iter(projections)
    gate_END, shared_gate_SD = _rows(next(projections), neurons_EN, always_S)
    up_END, shared_up_SD = _rows(next(projections), neurons_EN, always_S)
    down_EDN, shared_down_DS = _columns(next(projections), neurons_EN, always_S)
    return ExpertWeights(gate_END, up_END, down_EDN, shared_gate_SD, shared_up_SD, shared_down_DS)


def _rows(weight_FD: Tensor, neurons_EN: Tensor, always_S: Tensor) -> tuple[Tensor, Tensor]:
    rows = weight_FD.index_select(0, neurons_EN.flatten())
    return rows.view(*neurons_EN.shape, weight_FD.shape[1]), weight_FD.index_select(0, always_S)


def _columns(weight_DF: Tensor, neurons_EN: Tensor, always_S: Tensor) -> tuple[Tensor, Tensor]:
    if is_launch_bound(weight_DF.device):
        columns_PD = weight_DF.T.index_select(0, neurons_EN.flatten())
        return columns_PD.view(*neurons_EN.shape, len(weight_DF)).mT, weight_DF.index_select(1, always_S)
    # One selection of all columns: to select each expert's reads every row of the matrix E times.
    columns_DEN = weight_DF.index_select(1, neurons_EN.flatten()).view(len(weight_DF), *neurons_EN.shape)
    return columns_DEN.transpose(0, 1).contiguous(), weight_DF.index_select(1, always_S)


class TinyONNExpert(TinyONNSharedFFN):
    """One expert as a gated FFN of N dense neurons."""

    @classmethod
    def from_tensors(
        cls,
        gate_ND: Float[Tensor, "N D"],
        up_ND: Float[Tensor, "N D"],
        down_DN: Float[Tensor, "D N"],
        act: str | Callable[[Tensor], Tensor] = "silu",
    ) -> "TinyONNExpert":
        """An expert that holds these tensors, without a copy."""
        n, hidden_size = gate_ND.shape
        with torch.device("meta"):
            expert = cls(hidden_size, n, act)
        expert.gate_proj.weight = nn.Parameter(gate_ND)
        expert.up_proj.weight = nn.Parameter(up_ND)
        expert.down_proj.weight = nn.Parameter(down_DN)
        return expert


class Block(NamedTuple):
    """Neurons that are active on the same tokens; no token and no neuron repeats."""

    tokens_t: Int[Tensor, "t"]
    neurons_N: Int[Tensor, "N"]
    hidden_tN: Float[Tensor, "t N"]  # activations times gates


def sum_blocks(blocks: Sequence[Block], tokens: int, width: int) -> Float[Tensor, "T F"]:
    """Sum every neuron's activations over its active copies; at least one block is needed."""
    features_TF = blocks[0].hidden_tN.new_zeros(tokens, width)
    for tokens_t, neurons_N, hidden_tN in blocks:
        features_TF[tokens_t[:, None], neurons_N] += hidden_tN
    return features_TF


def group_by_expert(chosen_TK: Int[Tensor, "T K"], experts: int) -> Sequence[Int[Tensor, "t"]]:
    """For each expert, the ascending indices into `chosen_TK.flatten()` where it is chosen.

    One sort for all experts, so that the CPU waits for a GPU only once.
    """
    expert_P, place_P = chosen_TK.flatten().sort(stable=True)
    sizes = torch.searchsorted(expert_P, torch.arange(experts, device=expert_P.device), right=True).diff(
        prepend=expert_P.new_zeros(1)
    )
    return torch.split(place_P, sizes.tolist())


class _RoutedSum(torch.autograd.Function):
    """Sum of the chosen experts' outputs times gates; `places` are those of `group_by_expert`.

    Autograd alone would start thirty operators an expert, instead of eleven, and copy the outputs of all experts.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        x_TD: Tensor,
        gates_TK: Tensor,
        gate_END: Tensor,
        up_END: Tensor,
        down_EDN: Tensor,
        places: Sequence[Tensor],
        act: Callable[[Tensor], Tensor],
    ) -> Tensor:
        tokens, sizes = [place_t // gates_TK.shape[1] for place_t in places], [*map(len, places)]
        gate_PN, up_PN = (x_TD.new_empty(sum(sizes), gate_END.shape[1]) for _ in range(2))
        parts = _parts_of(sizes, gate_PN, up_PN)
        for tokens_t, gate_tN, up_tN, gate_ND, up_ND in zip(tokens, *parts, gate_END, up_END, strict=True):
            x_tD = x_TD.index_select(0, tokens_t)
            torch.mm(x_tD, gate_ND.T, out=gate_tN)
            torch.mm(x_tD, up_ND.T, out=up_tN)
        place_P = torch.cat([*places])
        gates_P = gates_TK.flatten()[place_P]
        hidden_PN = act(gate_PN) * up_PN * gates_P[:, None]
        output_TD = torch.zeros_like(x_TD)
        for tokens_t, hidden_tN, down_DN in zip(tokens, *_parts_of(sizes, hidden_PN), down_EDN, strict=True):
            output_TD.index_add_(0, tokens_t, hidden_tN @ down_DN.T)
        ctx.save_for_backward(x_TD, gates_TK, gate_END, up_END, down_EDN, gate_PN, up_PN, gates_P, hidden_PN, place_P)
        ctx.tokens, ctx.sizes, ctx.act = tokens, sizes, act
        return output_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - autograd's context
        x_TD, gates_TK, gate_END, up_END, down_EDN, gate_PN, up_PN, gates_P, hidden_PN, place_P = ctx.saved_tensors
        gradients = [torch.empty_like(weight) for weight in (gate_END, up_END, down_EDN)]
        of_gate_END, of_up_END, of_down_EDN = gradients
        of_hidden_PN = torch.empty_like(hidden_PN)
        parts = _parts_of(ctx.sizes, hidden_PN, of_hidden_PN)
        for tokens_t, hidden_tN, of_hidden_tN, down_DN, of_down_DN in zip(
            ctx.tokens, *parts, down_EDN, of_down_EDN, strict=True
        ):
            grad_tD = grad_TD.index_select(0, tokens_t)
            torch.mm(grad_tD, down_DN, out=of_hidden_tN)
            torch.mm(grad_tD.T, hidden_tN, out=of_down_DN)
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (gate_PN, up_PN, gates_P)]
            hidden_PN = ctx.act(leaves[0]) * leaves[1] * leaves[2][:, None]
        of_gate_PN, of_up_PN, of_gates_P = torch.autograd.grad(hidden_PN, leaves, of_hidden_PN)
        of_x_TD = torch.zeros_like(x_TD) if ctx.needs_input_grad[0] else None
        parts = _parts_of(ctx.sizes, of_gate_PN, of_up_PN)
        for tokens_t, of_gate_tN, of_up_tN, gate_ND, up_ND, of_gate_ND, of_up_ND in zip(
            ctx.tokens, *parts, gate_END, up_END, of_gate_END, of_up_END, strict=True
        ):
            x_tD = x_TD.index_select(0, tokens_t)
            torch.mm(of_gate_tN.T, x_tD, out=of_gate_ND)
            torch.mm(of_up_tN.T, x_tD, out=of_up_ND)
            if of_x_TD is not None:
                of_x_TD.index_add_(0, tokens_t, torch.addmm(of_gate_tN @ gate_ND, of_up_tN, up_ND))
        of_gates_TK = torch.zeros_like(gates_TK).flatten().index_put((place_P,), of_gates_P).view_as(gates_TK)
        return of_x_TD, of_gates_TK, *gradients, None, None


def _parts_of(sizes: list[int], *tensors: Tensor) -> list[Sequence[Tensor]]:
    return [torch.split(tensor, sizes) for tensor in tensors]


# Neurons of all experts per active neuron, from which the loop is always faster.
LOOP_FROM = 8


@dataclass(frozen=True)
class ExpertLoop:
    """One layer of experts: weights, indices of the dense neurons, and the router.

    The experts are computed one by one or, if `masked`, all for all tokens: two forms of one function.
    """

    experts: ExpertWeights
    neurons_EN: Int[Tensor, "E N"]
    always_S: Int[Tensor, "S"]
    router: LinearRouter
    top_k: int
    width: int  # F
    act: Callable[[Tensor], Tensor]
    gate: GateKind = GateKind.CONSTANT
    held: slice = field(default_factory=lambda: slice(None))  # the router's experts whose weights are here

    def __call__(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """The layer's output."""
        return self.masked_output(x_TD, self.gates(x_TD)) if self.masked else self.run(x_TD)[1]

    @property
    def masked(self) -> bool:
        """Whether every expert computes all tokens, with gates of 0 for those that do not choose it.

        The number of operators is then independent of E.
        """
        n = self.neurons_EN.shape[1]
        routed, active = self.router.experts * n, len(self.always_S) + self.top_k * n
        return prefers_large_products(self.router.rows_ED.device) and routed < LOOP_FROM * active

    def gates(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T E"]:
        """Gates of the chosen experts, relative to those of equal logits; 0 for the others."""
        chosen_TK, gates_TK = self._route(x_TD)
        return x_TD.new_zeros(len(x_TD), self.router.experts).scatter_(1, chosen_TK, gates_TK)

    def _route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts (T, K), and their gates."""
        with rounded_products(use=False):
            chosen_TK = self.router.choose(x_TD, self.top_k)
            return chosen_TK, relative_gates(self.gate, x_TD @ self.router.rows_ED.T, chosen_TK)

    def masked_output(self, x_TD: Float[Tensor, "T D"], gates_TE: Float[Tensor, "T E"]) -> Float[Tensor, "T D"]:
        """The output at given gates, without a loop."""
        return self._masked_sum(self._masked_hidden(x_TD, gates_TE), self._shared_hidden(x_TD))

    def _masked_sum(self, hidden_TP: Tensor, shared_TS: Tensor) -> Tensor:
        output_TD = hidden_TP @ self.experts.down_EDN.mT.flatten(0, 1)
        return torch.addmm(output_TD, shared_TS, self.experts.shared_down_DS.T) if len(self.always_S) else output_TD

    def _masked_hidden(self, x_TD: Tensor, gates_TE: Tensor) -> Tensor:
        """Activations times gates of the neurons of all experts, (T, E·N)."""
        hidden_TEN, gates_TE1 = self._all_hidden(x_TD), gates_TE[:, self.held, None]
        # In place, where no gradient needs the product: memory bounds it on a CPU.
        hidden_TEN = hidden_TEN * gates_TE1 if torch.is_grad_enabled() else hidden_TEN.mul_(gates_TE1)
        return hidden_TEN.flatten(1)

    def _all_hidden(self, x_TD: Tensor) -> Tensor:
        """Activations of the neurons of all experts, (T, E, N)."""
        gate_END, up_END = self.experts.gate_END, self.experts.up_END
        return self.hidden(x_TD, gate_END.flatten(0, 1), up_END.flatten(0, 1)).view(len(x_TD), *gate_END.shape[:2])

    def differentiable(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """The output for autograd."""
        if self.masked:
            return self.masked_output(x_TD, self.gates(x_TD))
        chosen_TK, gates_TK = self._route(x_TD)
        output_TD: Tensor = self.always_on_output(x_TD) if len(self.always_S) else 0 * x_TD
        if places := group_by_expert(chosen_TK, self.router.experts)[self.held]:
            weights = self.experts.gate_END, self.experts.up_END, self.experts.down_EDN
            routed_TD: Tensor = _RoutedSum.apply(x_TD, gates_TK, *weights, places, self.act)  # type: ignore[no-untyped-call]
            return output_TD + routed_TD
        return output_TD

    def run(self, x_TD: Float[Tensor, "T D"]) -> tuple[list[Block], Float[Tensor, "T D"]]:
        """The blocks of the always-on neurons and of every expert, and the layer's output.

        If `masked`, experts without copies of a neuron share a block.
        """
        if self.masked:
            return self._run_masked(x_TD)
        blocks, output_TD = [], torch.zeros_like(x_TD)
        for block, down_DN in self._parts(x_TD):
            blocks.append(block)
            output_TD.index_add_(0, block.tokens_t, block.hidden_tN @ down_DN.T)
        return blocks, output_TD

    def _run_masked(self, x_TD: Tensor) -> tuple[list[Block], Tensor]:
        neurons_EN = self.neurons_EN.long()
        everyone = torch.arange(len(x_TD), device=x_TD.device)
        hidden_TP = self._masked_hidden(x_TD, self.gates(x_TD))
        parts = [(neurons_EN.flatten(), hidden_TP)]
        if self._copied:
            parts = [*zip(neurons_EN, torch.split(hidden_TP, neurons_EN.shape[1], dim=1), strict=True)]
        shared_TS = self._shared_hidden(x_TD)
        parts = [(self.always_S.long(), shared_TS), *parts] if len(self.always_S) else parts
        return [Block(everyone, *part) for part in parts], self._masked_sum(hidden_TP, shared_TS)

    @cached_property
    def _copied(self) -> bool:
        """Whether experts share neurons. Cached, because a GPU's host waits for it."""
        return has_copies(self.neurons_EN)

    def with_change(self, change_DF: Float[Tensor, "D F"]) -> "ExpertLoop":
        """A copy with `change_DF` added to every neuron's down column, in all copies of the neuron."""
        return replace(
            self,
            experts=replace(
                self.experts,
                down_EDN=self.experts.down_EDN + change_DF[:, self.neurons_EN.long()].movedim(1, 0),
                shared_down_DS=self.experts.shared_down_DS + change_DF[:, self.always_S.long()],
            ),
        )

    def part(self, index: int, parts: int) -> "ExpertLoop":
        """Every `parts`-th expert and always-on neuron from `index` on; the parts' outputs sum to the layer's."""
        held, experts = slice(index, None, parts), self.experts
        weights = {name: weight[held] for name, weight in vars(experts).items()}
        weights["shared_down_DS"] = experts.shared_down_DS[:, held]
        copied = ExpertWeights(**weights).to(experts.down_EDN.device, experts.down_EDN.dtype)
        return replace(self, experts=copied, neurons_EN=self.neurons_EN[held], always_S=self.always_S[held], held=held)

    def always_on_output(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """The output of the always-on neurons."""
        return self._shared_hidden(x_TD) @ self.experts.shared_down_DS.T

    def _shared_hidden(self, x_TD: Tensor) -> Tensor:
        return self.hidden(x_TD, self.experts.shared_gate_SD, self.experts.shared_up_SD)

    def expert(self, index: int) -> TinyONNExpert:
        """One expert as a frozen module that holds these weights."""
        experts = self.experts
        weights = (experts.gate_END[index], experts.up_END[index], experts.down_EDN[index])
        return TinyONNExpert.from_tensors(*weights, self.act).requires_grad_(requires_grad=False)

    def expert_outputs(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T E D"]:
        """The outputs of all experts for every token, chosen or not; no gradient reaches the experts."""
        if is_launch_bound(x_TD.device):
            return torch.bmm(self._all_hidden(x_TD).transpose(0, 1), self.experts.down_EDN.mT).transpose(0, 1)
        output_TED = x_TD.new_empty(len(x_TD), len(self.neurons_EN), x_TD.shape[1])
        for index in range(len(self.neurons_EN)):
            output_TED[:, index] = self.expert(index)(x_TD)
        return output_TED

    def _parts(self, x_TD: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """Activations and down columns of the always-on neurons and of every expert."""
        experts = self.experts
        if len(self.always_S):
            everyone = torch.arange(len(x_TD), device=x_TD.device)
            yield Block(everyone, self.always_S.long(), self._shared_hidden(x_TD)), experts.shared_down_DS
        chosen_TK, gates_TK = self._route(x_TD)
        places = group_by_expert(chosen_TK, self.router.experts)[self.held]
        matrices = (self.neurons_EN.long(), experts.gate_END, experts.up_END, experts.down_EDN)
        for place_t, neurons_N, gate_ND, up_ND, down_DN in zip(places, *matrices, strict=True):
            tokens, slots = place_t // chosen_TK.shape[1], place_t % chosen_TK.shape[1]
            h_tN = self.hidden(x_TD.index_select(0, tokens), gate_ND, up_ND)
            yield Block(tokens, neurons_N, h_tN * gates_TK[tokens, slots, None]), down_DN

    def hidden(self, x_tD: Tensor, gate_ND: Tensor, up_ND: Tensor) -> Tensor:
        """Activations of an expert's neurons, without gates."""
        return gated(self.act, x_tD @ gate_ND.T, x_tD @ up_ND.T)
