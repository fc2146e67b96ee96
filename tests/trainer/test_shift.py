from __future__ import annotations

import numpy as np

from midflight.trainer.model.microbatch import inputs, predictions_of, shift, shifted_offsets

OFFSETS = np.array([0, 4, 6, 7], np.int32)
"""Rows of 4, 2 and 1 tokens."""


def test_each_row_loses_its_first_entry_whatever_the_array_says() -> None:
    ids = np.array([10, 11, 12, 13, 20, 21, 30], np.int32)
    versions = np.array([0, 0, 5, 6, 0, 7, 0], np.int32)
    assert shift(ids, OFFSETS).tolist() == [11, 12, 13, 21]
    assert shift(versions, OFFSETS).tolist() == [0, 5, 6, 7]
    assert inputs(ids, OFFSETS).tolist() == [10, 11, 12, 20]
    assert shifted_offsets(OFFSETS).tolist() == [0, 3, 4, 4]


def test_predictions_pair_each_target_with_the_token_before_it_in_the_same_row() -> None:
    ids = np.array([10, 11, 12, 13, 20, 21, 30], np.int32)
    found = predictions_of(ids, OFFSETS, mask=np.array([0, 0, 1, 1, 0, 1, 0], np.bool_))
    assert found.targets.tolist() == [12, 13, 21]
    assert found.input_ids[found.inputs].tolist() == [11, 12, 20]
    assert found.row.tolist() == [0, 0, 1]
