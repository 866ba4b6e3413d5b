"""Projections by their own names, wherever the checkpoint keeps them."""

from torch import Tensor

from models.checkpoint.reader import ShardReader
from models.families.fused import fused_name


def read_part(reader: ShardReader, name: str) -> Tensor:
    """A tensor of a dense checkpoint; gate, up, q, k or v out of the fused one where that is what there is.

    Raises:
        CheckpointError: neither is there.
    """
    whole = fused_name(name)
    if name in reader.names or whole not in reader.names:
        return reader.tensor(name)
    rows = _rows(reader, name, whole)
    # The other parts would stay in memory as long as this one.
    return reader.tensor(whole)[rows].clone()


def _rows(reader: ShardReader, name: str, whole: str) -> slice:
    count, part = reader.shape(whole)[0], name.split(".")[-2]
    if part in {"gate_proj", "up_proj"}:
        return slice(0, count // 2) if part == "gate_proj" else slice(count // 2, count)
    # As wide as what the output projection takes; k and v share the rest.
    queries = reader.shape(whole.replace("qkv_proj", "o_proj"))[1]
    keys = (count - queries) // 2
    starts = {"q_proj": (0, queries), "k_proj": (queries, queries + keys), "v_proj": (queries + keys, count)}
    return slice(*starts[part])
