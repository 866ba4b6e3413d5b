"""Sums of a scan between Redis and files.

The file has the format of `store=local`: an unfinished scan resumes from it under the name `sums.0.safetensors`. It
also holds the names of the weights, which are part of the Redis keys.
"""

import json
import math
from contextlib import closing
from pathlib import Path

from redis import Redis

from instruments.errors import ContractError
from stages.accumulators.config import START_OVER
from stages.accumulators.redis_connection import in_words
from stages.accumulators.redis_store import BITS, FIELDS, LAYOUT_VERSION, PROJECTIONS, RedisStore, pack_identity
from stages.accumulators.sums import ScanSums, load_sums, save_sums

MOST_ELEMENTS = 2**34


def find_scan(client: Redis, place: str, prefix: str) -> RedisStore:
    """The scan in a namespace. Raises ContractError: the namespace holds no scan, or one of another layout."""
    name = prefix or "(empty)"
    with in_words(place):
        held = client.get(f"{prefix}scan:identity")
    if held is None:
        what = f"there is no scan under the namespace {name}"
        raise ContractError(what, where=place, do="store.namespace= as the scan was given it")
    try:
        content = json.loads(held)
        sizes = [math.prod(size) for size, _kind in content["sums"].values()]
        if content["layout"] == LAYOUT_VERSION and 0 < min(sizes) <= max(sizes) < MOST_ELEMENTS:
            return RedisStore(client, place, prefix, str(held, "utf-8"))  # type: ignore[arg-type]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        pass
    what = f"the scan under the namespace {name} has another layout than {LAYOUT_VERSION}"
    raise ContractError(what, where=place, do=f"{START_OVER}; or the release that wrote it")


def export_sums(store: RedisStore, path: Path) -> ScanSums:
    """Write all sums of a scan to a file, atomically; adds pending chunks first."""
    sums, content = store.collect(), json.loads(store.identity)
    identity = json.dumps(content["facts"], sort_keys=True)
    save_sums(path, sums, {"identity": identity, "weights": content["weights"]})
    return sums


def import_sums(client: Redis, place: str, prefix: str, path: Path) -> ScanSums:
    """Add the sums of a file, from `export_sums` or `store=local`, to a namespace; a repetition changes nothing.

    The namespace `prefix` must be new, or of the same scan with other batches. Returns the sums it then holds.
    Raises ContractError: the file holds no sums, or the namespace holds another scan or a part of the file's batches.
    """
    sums, content = load_sums(path)
    if strange := sorted(sums.tensors.keys() ^ {*FIELDS, BITS}):
        what = f"this file holds no sums of a scan: {strange[0]} is missing or unknown"
        raise ContractError(what, where=str(path), do="a file that python -m pipeline store export wrote")
    # Default: the weight names of transformers' decoders.
    weights = content.get("weights") or [
        {part: f"model.layers.{layer}.mlp.{part}_proj.weight" for part in PROJECTIONS}
        for layer in range(len(sums.tensors[BITS]))
    ]
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in sums.tensors.items()}
    store = RedisStore(client, place, prefix, pack_identity(json.loads(content["identity"]), shapes, weights))
    with closing(store):
        store.claim()
        there = store.done() & sums.done
        if there and there != sums.done:
            what = f"{len(there)} of the file's {len(sums.done)} batches are in Redis already"
            raise ContractError(
                f"{what}: the rest cannot be told apart", where=f"{path}, {store.place}", do="a new namespace"
            )
        if not there:
            store.sums.add(sums)
            store.flush()
        return store.collect()
