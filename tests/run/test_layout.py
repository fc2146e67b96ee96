"""A batch as docs/foreign-trainers.md describes it, read with nothing but the standard library."""

from __future__ import annotations

import array
import json
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.run.test_trainer_routes import one_batch

from midflight.config import load_config
from midflight.errors import ConfigError
from midflight.run.api.batch_lists import batch_as_lists
from midflight.run.launcher.checks.check import Plan
from midflight.run.launcher.checks.table import checked
from midflight.run.parts import Purpose
from midflight.trajectories.packing import to_bytes

PAGE = Path(__file__).parents[2] / "docs" / "foreign-trainers.md"
CODES = {"I32": "i", "F32": "f", "BOOL": "b"}


def read(data: bytes) -> tuple[dict[str, str], dict[str, list[float]]]:
    """Metadata and arrays, by the layout of safetensors alone."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata, arrays = header.pop("__metadata__"), {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found = array.array(CODES[entry["dtype"]], data[8 + length + begin : 8 + length + end])
        if sys.byteorder == "big":
            found.byteswap()
        assert entry["shape"] == [len(found)]
        arrays[name] = found.tolist()
    return metadata, arrays


def test_the_bytes_are_laid_out_as_the_page_says_and_say_what_the_lists_say() -> None:
    batch = one_batch(7)
    metadata, arrays = read(to_bytes(batch))
    assert metadata == {"format": "midflight.packed_batch", "format_version": "1", "lease": "3", "train_version": "7"}
    table = PAGE.read_text().partition("| arrays | an entry for each |")[2].partition("\n\n")[0]
    named = " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", named)) == set(arrays)
    lists = batch_as_lists(batch)
    assert arrays["row_offsets"] == [0, 3] and arrays["row_rollout"] == [0]
    assert arrays["token_ids"] == lists.rows[0].token_ids == [1, 2, 3]
    assert arrays["loss_mask"] == [0, 1, 1] and lists.rows[0].loss_mask == [False, True, True]
    assert arrays["logprobs"] == [0.0, -0.5, -1.5]
    assert list(zip(arrays["rollout_group"], arrays["rewards"], arrays["truncated"], strict=True)) == [(0, 1.0, 0), (1, 0.25, 1)]


def test_what_truncation_kept_is_in_the_lists_as_ids() -> None:
    # The second token was drawn from ids 2 and 5 of many, the third from all.
    batch = replace(one_batch(7), kept=np.array([0, 2, 3], np.uint8), kept_lengths=np.array([0, 3, 0], np.int32))
    assert batch_as_lists(batch).rows[0].kept == [[], [2, 5], []]
    assert batch_as_lists(one_batch(7)).rows[0].kept is None


def test_the_page_shows_the_fields_that_the_lists_have() -> None:
    block = re.findall(r"```json\n(\{\n.*?)```", PAGE.read_text(), re.DOTALL)[0]
    shown, lists = json.loads(block), batch_as_lists(one_batch(7))
    assert set(shown) == set(lists.__struct_fields__)
    assert set(shown["rows"][0]) == set(lists.rows[0].__struct_fields__)
    assert set(shown["rollouts"][0]) == set(lists.rollouts[0].__struct_fields__)


def test_a_run_whose_every_turn_is_truncated_is_refused_for_a_trainer_that_does_not_read_what_was_kept(tmp_path: Path) -> None:
    config = load_config(None, [f"run.folder={tmp_path / 'run'}", "environment.top_p=0.9"])
    with pytest.raises(ConfigError, match=r"Set correction\.sampling_masks = true if yours does"):
        checked(Plan(config, purpose=Purpose.ROLLOUTS))
    assert not (tmp_path / "run").exists()
