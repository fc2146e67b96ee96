"""The one place that knows that the logits at a token predict the next one."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)


def shift(values: NDArray[Scalar], row_offsets: NDArray[np.integer[Any]]) -> NDArray[Scalar]:
    """Aligns a per-token array with the predictions: each row loses its first entry.

    [N] -> [N - R], where row r holds [row_offsets[r], row_offsets[r + 1]). Ids, mask, log-probabilities, versions: whatever is
    said of a token goes through here, so no two of them can be out of step. A row without tokens is not allowed.
    """
    assert (np.diff(row_offsets) > 0).all(), "every row has tokens"
    keep = np.ones(len(values), np.bool_)
    keep[row_offsets[:-1]] = False
    return values[keep]


def inputs(token_ids: NDArray[Scalar], row_offsets: NDArray[np.integer[Any]]) -> NDArray[Scalar]:
    """The tokens that predict: each row loses its last entry. `inputs(ids)[i]` is the token before `shift(ids)[i]`."""
    assert (np.diff(row_offsets) > 0).all(), "every row has tokens"
    keep = np.ones(len(token_ids), np.bool_)
    keep[row_offsets[1:] - 1] = False
    return token_ids[keep]


def shifted_offsets(row_offsets: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Where rows begin after `shift` and `inputs`: every row is one shorter. [R + 1]"""
    return np.asarray(row_offsets, np.int64) - np.arange(len(row_offsets))
