"""The log16 encoding: 16-bit codes on each column's own logarithmic scale."""

from collections.abc import Iterator

import numpy as np

from instruments.shapes import Float32, Float64, UInt16

NOT_MEASURED = 65535
LAST = 65534  # code of a column's largest value
ELEMENTS_AT_ONCE = 1 << 17  # float64 temporaries of this size stay in the cache


def encode_log16(values_RC: Float32[np.ndarray, "R C"]) -> tuple[Float64[np.ndarray, "2 C"], UInt16[np.ndarray, "R C"]]:
    """Quantise norms, >= 0, finite or NaN (not measured), column by column.

    Returns:
        ``(2, C)`` offset and step of each column, and ``(R, C)`` codes.
    Numerics: float64 logarithms, rounded half to even. A column with one value has step 0 and is exact in fp32.
    """
    scale_2C = _scale(values_RC)
    offset_C, step_C = scale_2C
    divisor_C = np.where(step_C > 0, step_C, 1.0)
    codes_RC = np.empty(values_RC.shape, np.uint16)
    for rows in _row_chunks(values_RC.shape):
        values = values_RC[rows]
        positive = values > 0
        codes = np.log(values, where=positive, out=np.repeat(offset_C[None], len(values), 0), dtype=np.float64)
        codes -= offset_C
        codes /= divisor_C
        np.rint(codes, out=codes)
        codes += 1
        np.clip(codes, 1, LAST, out=codes)
        codes *= positive
        codes[np.isnan(values)] = NOT_MEASURED
        codes_RC[rows] = codes
    return scale_2C, codes_RC


def decode_log16(
    scale_2C: Float64[np.ndarray, "2 C"], codes_RC: UInt16[np.ndarray, "R C"]
) -> Float32[np.ndarray, "R C"]:
    """Norms from their codes: ``(R, C)`` fp32, NaN where not measured.

    Numerics: float64, rounded to fp32 once at the end (adds at most 2^-24, 6e-8, of the value).
    """
    offset_C, step_C = scale_2C
    values_RC = np.empty(codes_RC.shape, np.float32)
    for rows in _row_chunks(codes_RC.shape):
        codes = codes_RC[rows]
        values = (codes - 1.0) * step_C
        values += offset_C
        # Reserved codes may overflow with large scales, and so may scales of a damaged file.
        with np.errstate(over="ignore", invalid="ignore"):
            np.exp(values, where=(codes > 0) & (codes < NOT_MEASURED), out=values)
        values[codes == 0] = 0
        values[codes == NOT_MEASURED] = np.nan
        values_RC[rows] = values
    return values_RC


def error_bound(scale_2C: Float64[np.ndarray, "2 C"]) -> Float64[np.ndarray, "C"]:
    """``(C,)`` largest relative error of each column."""
    with np.errstate(over="ignore", invalid="ignore"):  # scales of a damaged file
        return np.asarray(np.expm1(scale_2C[1] / 2))


def _scale(values_RC: Float32[np.ndarray, "R C"]) -> Float64[np.ndarray, "2 C"]:
    """Offset and step. The logarithm is monotone, so only the extremes need it."""
    columns = values_RC.shape[1]
    low_C, high_C = np.full(columns, np.inf, np.float32), np.zeros(columns, np.float32)
    for rows in _row_chunks(values_RC.shape):
        values = values_RC[rows]
        np.minimum(low_C, np.where(values > 0, values, np.float32(np.inf)).min(0), out=low_C)
        np.fmax(high_C, np.fmax.reduce(values, axis=0), out=high_C)
    empty_C = high_C == 0
    low_C[empty_C] = high_C[empty_C] = 1
    offset_C, top_C = np.log(low_C, dtype=np.float64), np.log(high_C, dtype=np.float64)
    return np.stack([offset_C, (top_C - offset_C) / (LAST - 1)])


def _row_chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    step = max(1, ELEMENTS_AT_ONCE // max(1, shape[1]))
    return (slice(start, start + step) for start in range(0, shape[0], step))
