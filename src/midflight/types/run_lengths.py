"""Flat arrays in which few values follow each other many times, such as masks and versions."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class RunLengths(NamedTuple):
    """R runs of equal values."""

    values: NDArray[Any]
    """[R]"""
    lengths: NDArray[np.int32]
    """[R], how often each value follows itself"""


def run_lengths(array: NDArray[Any]) -> RunLengths | None:
    """The runs of an array [N], or None if the array as it is takes fewer bytes. Values are equal
    if their bits are.
    """
    as_bits = array.view(f"<u{array.itemsize}")  # a float that is no number equals itself here
    starts = np.flatnonzero(as_bits[1:] != as_bits[:-1]) + 1
    num_runs = len(starts) + 1
    if not len(array) or num_runs * (array.itemsize + 4) >= array.nbytes:
        return None
    bounds = np.concatenate(([0], starts, [len(array)]))
    return RunLengths(array[bounds[:-1]], np.diff(bounds).astype("<i4"))
