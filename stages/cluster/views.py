"""The views in which two units can be compared, each a matrix of one row per unit."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from models.checkpoint.reader import ShardReader
from models.families.dense import dense_family
from models.families.fused_reading import read_part
from models.source import read_config, resolve_folder
from stages.cluster.config import ClusterConfig
from stages.cluster.contribution import contribution_features
from stages.cluster.evidence import FEATURES, LayerEvidence, require
from stages.cluster.features import coactivation_features, gate_row_features
from stages.cluster.join import join_views
from stages.cluster.profile import profile_features

NAMES = {
    "coactivation": "co-activation",
    "gate_rows": "gate rows",
    "contribution": "contribution",
    "taylor_profile": "Taylor profile",
}


def view_units(cluster: ClusterConfig, evidence: LayerEvidence) -> Float[Tensor, "F C"]:
    """The features of a layer's units that the settings ask for.

    Raises:
        ConfigError: the scan did not keep what they are made of.
    """
    return join_views([VIEWS[name](evidence, cluster.feature_dims) for name in cluster.views])


def name_views(cluster: ClusterConfig) -> str:
    """The views in words."""
    return " and ".join(NAMES[name] for name in cluster.views)


def view_coactivation(evidence: LayerEvidence, dims: int) -> Float[Tensor, "F C"]:
    """On which tokens a unit fires."""
    statistics = evidence.statistics
    require(
        statistics.reservoir_tokens,
        "the scan kept no activation bitmaps to compare units by",
        "scan.reservoir_tokens=4096, or cluster.features=gate_rows",
    )
    bits_Fr = statistics.active_bits[evidence.layer]
    return coactivation_features(bits_Fr, statistics.reservoir_tokens, dims=dims, rng=evidence.draw(FEATURES))


def view_gate_rows(evidence: LayerEvidence, dims: int) -> Float[Tensor, "F C"]:
    """What a unit listens to."""
    folder = resolve_folder(evidence.model)
    with ShardReader(folder) as reader:
        gate_name, _up, _down = dense_family(read_config(folder)).ffn(evidence.layer)
        gate_FD = read_part(reader, gate_name)
    return gate_row_features(gate_FD, dims=dims, rng=evidence.draw(FEATURES))


def view_contribution(evidence: LayerEvidence, dims: int) -> Float[Tensor, "F C"]:
    """To which tokens' outputs a unit adds how much."""
    activity = evidence.activity
    return contribution_features(activity.hiddens, activity.ffn.down_DF, dims=dims, rng=evidence.draw(FEATURES))


def view_taylor_profile(evidence: LayerEvidence, _dims: int) -> Float[Tensor, "F G"]:
    """To which text domains a unit is important."""
    domains, remedy = evidence.domains, "data.domain_field=, files of several domains, or cluster.features=coactivation"
    require(domains, "the scan kept no Taylor sums by text domain", "scan.domains=true")
    assert domains is not None
    require(len(domains.names) >= 2, f"the calibration text has one domain only ({domains.names[0]})", remedy)
    samples_G1 = torch.tensor(domains.samples)[:, None]
    return profile_features(domains.sum_taylor[:, evidence.layer] / samples_G1)


VIEWS: dict[str, Callable[[LayerEvidence, int], Tensor]] = {
    "coactivation": view_coactivation,
    "gate_rows": view_gate_rows,
    "contribution": view_contribution,
    "taylor_profile": view_taylor_profile,
}
