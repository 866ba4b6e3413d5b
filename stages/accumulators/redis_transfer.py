"""Sums of a scan between Redis and files.

A file has the format of `store=local`: as `sums.0.safetensors` in the staging folder of a scan it is resumed. It also
holds the names of the weights, which are part of the Redis keys.
"""

import json
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any

import torch
from redis import Redis

from instruments.errors import ContractError
from instruments.safetensors_files import save_tensors
from stages.accumulators.config import START_OVER
from stages.accumulators.redis_connection import in_words
from stages.accumulators.redis_store import BITS, FIELDS, LAYOUT_VERSION, PROJECTIONS, RedisStore, pack_identity
from stages.accumulators.sums import ScanSums, load_sums

MOST_ELEMENTS = 2**34
AVERAGES = ("avg_act", "avg_grad_norm", "freq_act")
# Keys of an identity that are no facts of the scan, see `pack_identity`.
PACKED = ("layout", "sums", "weights")
# What foreign content raises.
FOREIGN = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


def export_sums(client: Redis, place: str, prefix: str, path: Path) -> ScanSums:
    """Write all sums of a namespace to a file, atomically; adds pending chunks first. Raises: see `_open_namespace`."""
    store, content = _open_namespace(client, place, prefix)
    sums = store.collect()
    identity = json.dumps({key: fact for key, fact in content.items() if key not in PACKED}, sort_keys=True)
    facts = {"identity": identity, "weights": content["weights"], "counters": sums.counters, "done": sorted(sums.done)}
    save_tensors(path, sums.tensors, **facts)
    return sums


def write_averages(client: Redis, place: str, prefix: str, _path: Path) -> ScanSums:
    """Write the averages of the sums that the namespace holds now into the same hashes; no scan reads them.

    `avg_act` and `freq_act` are per token, `avg_grad_norm` per sample. Raises: see `_open_namespace`.
    """
    store, _content = _open_namespace(client, place, prefix)
    sums = store.collect()
    counts = [max(sums.counters.get(name, 0), 1) for name in ("tokens", "samples", "tokens")]
    with in_words(place):
        for layer, rows in enumerate(store.rows):
            for projection, row in zip(PROJECTIONS, rows, strict=True):
                fields = ("sum_abs", f"grad_norm_{projection}", "active_count")
                values_3F = [
                    sums.tensors[name][layer].double() / count for name, count in zip(fields, counts, strict=True)
                ]
                with client.pipeline(transaction=False) as pipe:
                    for neuron, values in enumerate(torch.stack(values_3F, dim=1).tolist()):
                        pipe.hset(f"{row}{neuron}", mapping=dict(zip(AVERAGES, values, strict=True)))
                    pipe.execute()
    return sums


def _open_namespace(client: Redis, place: str, prefix: str) -> tuple[RedisStore, dict[str, Any]]:
    """The store of a namespace, and its identity.

    Raises ContractError: the namespace holds no scan, or one of another layout; or see `RedisStore.collect`.
    """
    name = prefix or "(empty)"
    with in_words(place):
        held = client.get(f"{prefix}scan:identity")
    if held is None:
        what = f"there is no scan under the namespace {name}"
        raise ContractError(what, where=place, do="--namespace as the scan has in store.namespace")
    try:
        content = json.loads(held)
        sizes = [prod(size) for size, _kind in content["sums"].values()]
        if content["layout"] != LAYOUT_VERSION or not 0 < min(sizes) <= max(sizes) < MOST_ELEMENTS:
            raise ValueError("another layout")
        store = RedisStore(client, place, prefix, str(held, "utf-8"))  # type: ignore[arg-type]
    except FOREIGN as error:
        what = f"the scan under the namespace {name} has another layout than {LAYOUT_VERSION}"
        raise ContractError(what, where=place, do=f"{START_OVER}; or the release that wrote it") from error
    return store, content


def import_sums(client: Redis, place: str, prefix: str, path: Path) -> ScanSums:
    """Add the sums of a file, from `export_sums` or `store=local`, to a namespace; a repetition changes nothing.

    The namespace `prefix` must be new, or of the same scan with other batches. Returns the sums it then holds.
    Raises ContractError: the file holds no sums, or the namespace holds another scan or a part of the file's batches.
    """
    do = "a file of python -m pipeline store export, or of store=local"
    sums, facts = load_sums(path, do=do)
    try:
        if strange := sorted(sums.tensors.keys() ^ {*FIELDS, BITS}):
            raise ValueError(f"{strange[0]} is missing or unknown")
        # Default: the weight names of transformers' decoders.
        weights = facts.get("weights") or [
            {part: f"model.layers.{layer}.mlp.{part}_proj.weight" for part in PROJECTIONS}
            for layer in range(len(sums.tensors[BITS]))
        ]
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in sums.tensors.items()}
        store = RedisStore(client, place, prefix, pack_identity(json.loads(facts["identity"]), shapes, weights))
    except FOREIGN as error:
        raise ContractError(f"the file holds no sums of a scan: {error}", where=str(path), do=do) from error
    with closing(store):
        store.claim()
        if not sums.done & store.done():
            store.sums.add(sums)
            store.flush()  # all of the file's batches, or none if another worker has flushed one since
        held = store.collect()
    if not sums.done <= held.done:
        there = f"{len(sums.done & held.done)} of the file's {len(sums.done)} batches are in Redis already"
        what = f"{there}: the rest cannot be told apart"
        raise ContractError(what, where=f"{path}, {store.place}", do="another --namespace")
    return held
