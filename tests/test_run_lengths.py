"""Flat arrays as runs of equal values."""

import numpy as np
import pytest
from numpy.typing import NDArray

from midflight.types.run_lengths import run_lengths


@pytest.mark.parametrize(
    "array",
    [
        np.repeat(np.array([True, False, True]), 40),
        np.repeat(np.array([3, -7, 3], dtype=np.int64), 9),
        np.repeat(np.array([0.0, -0.0, np.nan, 1.5], dtype=np.float32), 12),
        np.full(1000, np.nan, dtype=np.float64),
    ],
)
def test_runs_say_the_same_array_to_the_bit_in_fewer_bytes(array: NDArray[np.generic]) -> None:
    runs = run_lengths(array)
    assert runs is not None
    again = np.repeat(runs.values, runs.lengths)
    assert again.dtype == array.dtype and again.tobytes() == array.tobytes()
    assert runs.values.nbytes + runs.lengths.nbytes < array.nbytes


@pytest.mark.parametrize("array", [np.zeros(0, np.int32), np.arange(50), np.array([True, False] * 20), np.ones(1, np.float32)])
def test_an_array_without_long_runs_stays_as_it_is(array: NDArray[np.generic]) -> None:
    assert run_lengths(array) is None
