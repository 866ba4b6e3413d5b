"""Sums of a scan from Redis to a file and back.

The file is what `store=local` keeps of an unfinished scan: put in its place as `sums.0.safetensors`, a scan goes on
from it. Added to it are the names of the weights, which the keys in Redis need.
"""

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from instruments.errors import ContractError
from stages.accumulators.redis_connection import in_words
from stages.accumulators.redis_layout import PROJECTIONS, columns_of, pack_cache_key
from stages.accumulators.redis_namespace import Namespace
from stages.accumulators.redis_store import RedisStore
from stages.accumulators.sums import ScanSums

if TYPE_CHECKING:
    from redis import Redis


def export_sums(namespace: Namespace, path: Path) -> ScanSums:
    """Write all that lies under a namespace; pending chunks are added first. Replaces the file in one step."""
    with closing(RedisStore(namespace, every=0)) as store:
        sums = store.collect()
    facts = json.loads(namespace.identity)["facts"]
    content = {
        "identity": json.dumps(facts, sort_keys=True),
        "counters": sums.counters,
        "done": sorted(sums.done),
        "weights": namespace.weights,
    }
    temporary = path.with_name(f"{path.name}.tmp")
    save_file(sums.tensors, temporary, metadata={"facts": json.dumps(content)})
    temporary.replace(path)
    return sums


def import_sums(client: "Redis", place: str, prefix: str, path: Path) -> ScanSums:
    """Add a file's sums to a namespace; done again it changes nothing.

    Args:
        client: of the server.
        place: the server in words.
        prefix: the namespace: new, or one of the same scan with other batches.
        path: as `export_sums` or `store=local` wrote it.

    Returns:
        What the namespace now holds.

    Raises:
        ContractError: the file is no such file, or the namespace holds another scan or some of the file's batches.
    """
    sums, content = load_sums(path)
    sizes = {name: [list(value.shape), str(value.dtype).removeprefix("torch.")] for name, value in sums.tensors.items()}
    weights = content.get("weights") or _usual_names(len(sums.tensors["sum_abs"]))
    namespace = Namespace(client, prefix, pack_cache_key(json.loads(content["identity"]), sizes, weights), place)
    with in_words(namespace.place):
        namespace.claim()
        there = namespace.done() & sums.done
    if there and there != sums.done:
        what = (
            f"{len(there)} of the file's {len(sums.done)} batches lie in Redis already: the rest cannot be told apart"
        )
        raise ContractError(what, where=f"{path}, {namespace.place}", do="a new namespace")
    with closing(RedisStore(namespace, every=0)) as store:
        if not there:
            store.sums.add(sums)
            store.flush()
        return store.collect()


def load_sums(path: Path) -> tuple[ScanSums, dict[str, Any]]:
    """The sums in a file, and what stands beside them.

    Raises:
        ContractError: it cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
            content: dict[str, Any] = json.loads((file.metadata() or {})["facts"])
        columns_of(tensors)
        return ScanSums(tensors, content["counters"], set(content["done"])), content
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        what = f"this file holds no sums of a scan: {error}"
        raise ContractError(what, where=str(path), do="a file that python -m pipeline.store export wrote") from error


def _usual_names(layers: int) -> list[dict[str, str]]:
    """Names of the weights in transformers' decoders, for files that do not tell."""
    return [{part: f"model.layers.{layer}.mlp.{part}_proj.weight" for part in PROJECTIONS} for layer in range(layers)]
