"""Annotations of shapes in jaxtyping's notation, `Float[Tensor, "B T D"]`, for readers: the package is not needed."""

from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Float32
from typing import Annotated as Float64
from typing import Annotated as Int
from typing import Annotated as Int32
from typing import Annotated as Shaped
from typing import Annotated as UInt16

__all__ = ["Bool", "Float", "Float32", "Float64", "Int", "Int32", "Shaped", "UInt16"]
