from dataclasses import replace

import torch
from pico import write_pico
from torch.nn.functional import kl_div

from models.config import ModelConfig
from models.ffn import ffn_modules
from models.loading import load_dense
from stages.layers.config import LENGTH, TOKENS
from stages.layers.stage import measure_costs, pick_sequences
from stages.text.batches import TokenSequence, batch_sequences

L, F, V = 3, 40, 61


def test_the_cost_is_the_divergence_of_a_model_whose_other_neurons_are_zero(tmp_path):
    folder = write_pico(tmp_path / "llama", "llama", layers=L, intermediate=F)
    drawn = torch.Generator().manual_seed(0)
    ids = [torch.randint(V, (length,), generator=drawn).tolist() for length in (9, 5)]
    labels = [ids[0], [*ids[1][:3], -100, ids[1][4]]]
    given = [TokenSequence("a", *pair) for pair in zip(ids, labels, strict=True)]
    contribution_LF = torch.rand(L, F, generator=drawn)
    dense = load_dense(ModelConfig(dtype="float32"), folder)
    costs_SL = measure_costs(dense, batch_sequences(given, 100, 0), contribution_LF, [0.5, 0.2])
    assert costs_SL.shape == (2, L)
    for row, kept in enumerate((20, 8)):
        for layer in range(L):
            narrow = load_dense(ModelConfig(dtype="float32"), folder)
            dropped = contribution_LF[layer].argsort()[: F - kept]
            ffn_modules(narrow)[layer].down_proj.weight[:, dropped] = 0
            total = 0.0
            for sequence in given:
                theirs, ours = (
                    model(torch.tensor([sequence.ids])).logits[0, :-1].log_softmax(-1) for model in (dense, narrow)
                )
                counts = torch.tensor(sequence.labels[1:]) >= 0
                total += float(kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)[counts].sum())
            torch.testing.assert_close(float(costs_SL[row, layer]), total / 11, rtol=1e-4, atol=1e-7)
    assert (costs_SL[1] > costs_SL[0]).all()


def test_text_that_was_scanned_is_used_only_if_there_is_no_other():
    def text(*numbers):
        return [TokenSequence("a", [number] * 300, [number] * 300) for number in numbers]

    picked = pick_sequences(text(*range(50)), text(*range(20)))
    assert 0.9 * TOKENS < sum(len(sequence.ids) for sequence in picked) < 1.5 * TOKENS
    assert {len(sequence.ids) for sequence in picked} == {LENGTH}
    numbers = [sequence.ids[0] for sequence in picked]
    assert min(numbers) == 20
    assert max(numbers) > 40
    assert [sequence.ids[0] for sequence in pick_sequences(text(1, 2), text(1, 2, 3))] == [1, 2]


def test_all_tokens_count_where_the_answer_begins_behind_the_cut():
    late = TokenSequence("a", [5] * 300, [-100] * (LENGTH + 1) + [5] * (299 - LENGTH))
    early = replace(late, labels=[-100] * 9 + [5] * 291)
    found = [sum(label >= 0 for label in sequence.labels) for sequence in pick_sequences([late, early], [])]
    assert found == [LENGTH, LENGTH - 9]
