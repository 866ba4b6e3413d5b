"""Heals a carve of the embedded model by one idea, and prints its gap and KL on the held-out text before and after.

PYTHONPATH=.:tests python -m studies.healing_ideas outputs/artifacts/embedded/project/KEY --tokens 100000
--freeze high --score outputs/artifacts/embedded/score/KEY --cluster outputs/artifacts/embedded/cluster/KEY

A minute of one core for 100,000 tokens. --freeze needs Glm4MoeForCausalLM, the default target.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from models import loading
from models.config import ModelConfig
from models.source import resolve_folder
from models.training import (
    ALL_EXPERTS_FUNCTIONS,
    STRAIGHT_THROUGH,
    Part,
    RouterWatch,
    parameter_groups,
    show_scores,
    soft_choice,
)
from pipeline.settings import compose
from stages.artifacts.carve import Partition, Scores
from stages.train.loop import BETAS, collate, order_sequences, read_text
from stages.train.objective import Balance, Objective, Phase, heldout_sums, rate_factor
from stages.train.stage import load_trainable

CPU = torch.device("cpu")
WIDTH = {"experts": None}  # experts that are on now; None: as many as the checkpoint chooses


def compute_annealed(self, x_TD, chosen_TK, gates_TK):
    """As `compute_all`, with the `WIDTH` experts of highest score on, the last of them in part."""
    gate_up_EMD, down_EDN, scores_TE = self.gate_up_proj, self.down_proj, self.router_scores
    h_TEN = self._apply_gate(nn.functional.linear(x_TD, gate_up_EMD.flatten(0, 1)).view(-1, *gate_up_EMD.shape[:2]))
    gates_TE = torch.zeros_like(scores_TE, dtype=gates_TK.dtype).scatter(1, chosen_TK, gates_TK)
    if WIDTH["experts"] is not None:
        rank_TE = scores_TE.argsort(1, descending=True).argsort(1)
        scored_TE = scores_TE.sigmoid()
        scale_T1 = gates_TK.sum(1, keepdim=True) / scored_TE.gather(1, chosen_TK).sum(1, keepdim=True)
        gates_TE = scored_TE * scale_T1 * (WIDTH["experts"] - rank_TE).clamp(0, 1)
    if torch.is_grad_enabled():
        soft_TE = soft_choice(scores_TE, chosen_TK)
        gates_TE = gates_TE + gates_TK.detach().mean(1, keepdim=True) * (soft_TE - soft_TE.detach())
    gated_TEN = h_TEN * gates_TE[:, :, None].to(h_TEN.dtype)
    return (gated_TEN.flatten(1) @ down_EDN.transpose(1, 2).flatten(0, 1)).to(x_TD.dtype)


def learning_masks(model, how, score, cluster, seed):
    """Parameter → 1 where it learns: half of each layer's neurons are frozen, those of high, low or random S_p."""
    score_LF, partition, masks = Scores.load(score).chosen, Partition.load(cluster), {}
    generator = torch.Generator().manual_seed(seed)
    for layer in partition.carved_layers:
        neurons_EN, always_S = partition.neurons_of(layer).long(), partition.always_on[layer].long()
        parts = [score_LF[layer][neurons_EN], score_LF[layer][always_S]]
        if how == "random":
            parts = [torch.rand(part.shape, generator=generator) for part in parts]
        sign = -1 if how == "low" else 1
        middle = torch.cat([sign * part.flatten() for part in parts]).median()
        learn_EN, learn_S = ((sign * part <= middle).float() for part in parts)
        ffn = model.model.layers[layer].mlp
        masks[ffn.experts.gate_up_proj] = learn_EN.repeat(1, 2)[:, :, None]
        masks[ffn.experts.down_proj] = learn_EN[:, None]
        masks[ffn.shared_experts.gate_proj.weight] = masks[ffn.shared_experts.up_proj.weight] = learn_S[:, None]
        masks[ffn.shared_experts.down_proj.weight] = learn_S[None]
    return masks


@torch.no_grad()
def measure(model, dense, batches):
    """Gap and KL on the held-out text, in nats."""
    model.eval()
    ours = sum(heldout_sums(model, dense, batch, CPU) for batch in batches)
    theirs = sum(heldout_sums(dense, None, batch, CPU) for batch in batches)
    return f"gap {(ours[0] - theirs[0]) / ours[2]:.4f}, KL {ours[1] / ours[2]:.4f}"


def heal(model, dense, text, train, wanted, masks):
    """The loop of stage=train, without its record and checkpoints."""
    shown, watch = show_scores(model), RouterWatch(model)
    phase = Phase("all", 0, round(train.tokens / (train.batch * 256)), frozenset(Part))
    objective = Objective(train, watch, dense, Balance("none", 0.0))
    groups = parameter_groups(
        model, router_rate=train.router_rate, expert_rate=train.expert_rate, rest_rate=train.rest_rate
    )
    optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0, fused=True)
    peaks, chosen = [group["lr"] for group in groups], model.config.num_experts_per_tok
    sequences = order_sequences(text.train.sequences, 0, phase.steps * train.batch, wanted.seed)
    for step in range(phase.steps):
        part = 2 * step / phase.steps  # of the first half
        WIDTH["experts"] = wanted.anneal + (chosen - wanted.anneal) * part if wanted.anneal and part < 1 else None
        batch = collate(sequences[step * train.batch : (step + 1) * train.batch], text.pad_id, CPU)
        model.train()
        objective.loss(model, batch, (batch["labels"][:, 1:] >= 0).sum(), 1, 1).backward()
        for parameter, mask in masks.items():
            parameter.grad.mul_(mask)
        nn.utils.clip_grad_norm_(model.parameters(), train.gradient_norm)
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * rate_factor(step, phase, train)
        optimizer.step()
        optimizer.zero_grad()
    WIDTH["experts"] = None
    for hook in shown:
        hook.remove()
    watch.remove()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("carve", type=Path, help="folder of stage=project, or of stage=assemble for the experts as cut")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the text and of random masks")
    parser.add_argument("--rates", type=float, nargs=2, default=[2e-4, 5e-5], help="of experts and of the rest")
    parser.add_argument("--freeze", choices=["high", "low", "random"], help="S_p of the half that does not learn")
    parser.add_argument("--score", type=Path)
    parser.add_argument("--cluster", type=Path)
    parser.add_argument("--anneal", type=float, help="experts at the start, fewer until the half of the steps")
    wanted = parser.parse_args()
    experts, rest = wanted.rates
    words = ["stage=train", "train=heal", f"train.tokens={wanted.tokens}", "train.batch=4", "train.micro_batch=4"]
    words += [f"train.expert_rate={experts}", f"train.rest_rate={rest}", "train.precision=bfloat16"]
    settings, _folder = compose([*words, "train.heldout_sequences=1000"])
    if wanted.anneal:
        ALL_EXPERTS_FUNCTIONS.register(STRAIGHT_THROUGH, compute_annealed)
    source = resolve_folder(ModelConfig())
    tokenizer = loading.load_tokenizer(source, trust_remote_code=False)
    text = read_text(settings.data, settings.train, tokenizer, loading.padding_id(tokenizer))
    dense = loading.load_dense(ModelConfig(dtype="float32"), source)
    model = load_trainable(wanted.carve / "checkpoint", all_experts=True)
    masks = learning_masks(model, wanted.freeze, wanted.score, wanted.cluster, wanted.seed) if wanted.freeze else {}
    print("before", measure(load_trainable(wanted.carve / "checkpoint"), dense, text.heldout))  # noqa: T201
    heal(model, dense, text, settings.train, wanted, masks)
    print("after ", measure(model, dense, text.heldout))  # noqa: T201


if __name__ == "__main__":
    main()
