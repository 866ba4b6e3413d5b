"""Remembered features equal computed ones."""

from dataclasses import replace

import torch

from stages.evaluate import baselines as carved_ffn
from stages.evaluate.baselines import Memo, start_baseline


def remember(carved):
    features = Memo(carved.features)
    return features, replace(carved, features=features)


def test_remembered_features_are_used_and_others_computed(facts, x_TD):
    carved = start_baseline("unaligned", facts, [])
    features, remembered = remember(carved)
    torch.testing.assert_close(remembered(x_TD.clone()), carved(x_TD))
    twice_TF = 2 * carved.features(x_TD)
    features.keep(x_TD, twice_TF)
    torch.testing.assert_close(remembered(x_TD), 2 * carved(x_TD))
    ((block,), output_TD) = remembered.run(x_TD)
    assert torch.equal(block.hidden_tN, twice_TF)
    torch.testing.assert_close(output_TD, 2 * carved(x_TD))


def test_there_is_an_end_to_what_is_remembered(facts, x_TD, monkeypatch):
    carved = start_baseline("static_mask", facts, [])
    features, features_TF = Memo(carved.features), carved.features(x_TD)
    monkeypatch.setattr(carved_ffn, "MOST_BYTES", features_TF.nbytes)
    other_TD = x_TD.clone()
    features.keep(x_TD, features_TF)
    features.keep(other_TD, features_TF)
    assert features(x_TD) is features_TF
    assert features(other_TD) is not features_TF
    features.forget(x_TD)
    features.keep(other_TD, features_TF)
    assert features(other_TD) is features_TF
    assert features(x_TD) is not features_TF
