"""layers: what narrowing each layer alone costs the dense model, for `dense_layers=auto`."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from models.config import ModelConfig
from models.device import send
from models.ffn import ffn_modules
from models.finding import find_decoder
from models.loading import input_device, load_dense, load_tokenizer, padding_id
from models.source import resolve_folder
from stages.artifacts.carve import LayerCosts, NeuronStatistics
from stages.artifacts.job import Job, Table
from stages.layers.choice import choose_dense_layers
from stages.layers.config import LENGTH, NARROWER, TOKENS
from stages.losses import sum_losses, supervised_tokens
from stages.text.batches import TokenBatch, TokenSequence, batch_sequences
from stages.text.config import DataConfig, sampled
from stages.text.sequences import find_fault, load_text


def run(job: Job, *, model: ModelConfig, data: DataConfig, active: float) -> Table:
    """Write the costs of all layers at two widths."""
    folder = resolve_folder(model)
    tokenizer = load_tokenizer(folder, trust_remote_code=model.trust_remote_code)
    scanned, text = (load_text(given, tokenizer, "calibration").sequences for given in (sampled(data), data))
    batches = batch_sequences(pick_sequences(text, scanned), LENGTH, padding_id(tokenizer))
    contribution_LF = NeuronStatistics.load(job.parents["scan"]).contribution
    shares = [active, NARROWER * active]
    costs = measure_costs(load_dense(model, folder), batches, contribution_LF, shares).tolist()
    LayerCosts(active, torch.tensor(costs, dtype=torch.float64)).save(job.out)
    rows = [[layer, *(f"{cost:.4f}" for cost in pair)] for layer, pair in enumerate(zip(*costs, strict=True))]
    narrow = find_decoder(folder).narrow
    found = {} if narrow else {able: choose_dense_layers(costs, active, able) for able in ("any", "ends", "first")}
    chosen = {able: f"'dense_layers={layers}'".replace(" ", "") for able, layers in found.items()}  # to paste
    notes = [
        f"KL(dense || model) per token in nats, with one layer narrowed to its neurons of most mean |h|*|d|; "
        f"{sum(batch.tokens for batch in batches)} tokens",
        f"layers of fewer neurons stay dense: {', '.join(map(str, narrow))}"
        if narrow
        else f"predicted to lose least at active={active:g}: {chosen['any']}; of the first and last layers "
        f"{chosen['ends']}, of the first alone {chosen['first']}",
    ]
    return Table("layers", ("layer", *(f"KL at {share:.0%}" for share in shares)), rows, notes)


def pick_sequences(text: Sequence[TokenSequence], scanned: Sequence[TokenSequence]) -> list[TokenSequence]:
    """About `TOKENS` tokens, evenly spaced over the text that was not scanned; over all of it, if there is no other.

    All tokens count in a sequence whose answers begin behind the cut.
    """
    known = {tuple(sequence.ids) for sequence in scanned}
    others = [sequence for sequence in text if tuple(sequence.ids) not in known] or text
    parts = [sequence.cut(LENGTH) for sequence in others]
    parts = [part if find_fault(part.labels) is None else replace(part, labels=part.ids) for part in parts]
    return parts[:: max(1, sum(len(part.ids) for part in parts) // TOKENS)]


@torch.no_grad()
def measure_costs(
    dense: PreTrainedModel,
    batches: Sequence[TokenBatch],
    contribution_LF: Float[Tensor, "L F"],
    shares: Sequence[float],
) -> Float[Tensor, "S L"]:
    """KL(dense ‖ dense with one layer narrowed) per token, fp64, for each share of neurons kept.

    Cost: 1 + S·L forward passes. Memory: two batches of logits.
    """
    ffns, width = ffn_modules(dense), contribution_LF.shape[1]
    costs_SL = torch.zeros(len(shares), len(ffns), dtype=torch.float64)
    for batch in tqdm(batches, desc="layers", unit="batch"):
        inputs = batch.inputs(input_device(dense))
        wanted_BTV = dense(**inputs, use_cache=False).logits
        labels_BT = send(batch.labels, wanted_BTV.device, torch.int64)
        for layer, ffn in enumerate(ffns):
            best_F = contribution_LF[layer].argsort(descending=True, stable=True)
            for row, share in enumerate(shares):
                kept_F = torch.zeros(width).index_fill_(0, best_F[: max(1, round(share * width))], 1.0)
                with ffn.down_proj.register_forward_pre_hook(
                    lambda _module, args, kept_F=kept_F: (args[0] * kept_F[: args[0].shape[-1]].to(args[0]),)
                ):
                    logits_BTV = dense(**inputs, use_cache=False).logits
                costs_SL[row, layer] += sum_losses(logits_BTV, labels_BT, wanted_BTV)[1].cpu()
    return costs_SL / sum(int(supervised_tokens(batch.labels).sum()) for batch in batches)
