"""Names, replacement of all weights at once, and fingerprints that any byte changes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midflight.errors import WeightsCorrupt
from midflight.models import sizes
from midflight.models.names import as_tensors, assign, named_tensors
from midflight.models.sizes import fingerprint, fingerprint_views
from midflight.types import TensorSpec

from .tiny import tiny_model

IDS = torch.tensor([[257, 104, 105, 256, 258]])
SPECS = (TensorSpec("a", "F32", (2, 2), 0, 16), TensorSpec("b", "BF16", (3,), 64, 6))
BUFFER = bytes(range(80))


def test_tied_weights_appear_once_and_order_is_the_models():
    tied, untied = named_tensors(tiny_model(tied=True)), named_tensors(tiny_model(tied=False))
    assert "lm_head.weight" not in tied
    assert "lm_head.weight" in untied
    assert next(iter(tied)) == "model.embed_tokens.weight"
    assert list(tied) == [n for n in untied if n != "lm_head.weight"]


@pytest.mark.parametrize("tied", [True, False])
def test_assigning_makes_the_other_model_without_copying(tied: bool):
    model, other = tiny_model(seed=1, tied=tied), tiny_model(seed=2, tied=tied)
    tensors = {n: t.clone() for n, t in named_tensors(other).items()}
    before = {n: t.data_ptr() for n, t in named_tensors(model).items()}
    replaced = assign(model, tensors)
    assert {n: t.data_ptr() for n, t in replaced.items()} == before
    assert torch.equal(model(IDS).logits, other(IDS).logits)
    assert {n: t.data_ptr() for n, t in named_tensors(model).items()} == {n: t.data_ptr() for n, t in tensors.items()}
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_assigning_another_dtype_converts():
    model, other = tiny_model(seed=1), tiny_model(seed=2, dtype="bfloat16")
    assign(model, named_tensors(other))
    assert {t.dtype for t in named_tensors(model).values()} == {torch.float32}
    assert torch.equal(named_tensors(model)["model.norm.weight"], named_tensors(other)["model.norm.weight"].float())


@pytest.mark.parametrize("fault", ["missing", "unexpected", "tied", "shape"])
def test_i7_tensors_that_do_not_fit_are_named_and_nothing_is_assigned(fault: str):
    model = tiny_model(seed=1)
    before = model(IDS).logits
    tensors = dict(named_tensors(tiny_model(seed=2)))
    name = {"missing": "model.norm.weight", "unexpected": "model.extra", "tied": "lm_head.weight", "shape": "model.norm.weight"}[fault]
    if fault == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(7)
    with pytest.raises(WeightsCorrupt, match=name.replace(".", r"\.")):
        assign(model, tensors)
    assert torch.equal(model(IDS).logits, before)


def test_tensors_over_bytes_share_them():
    data = bytearray(16)
    tensor = as_tensors(SPECS[:1], {"a": memoryview(data)})["a"]
    data[0:4] = b"\x00\x00\x80\x3f"
    assert tensor.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_an_empty_tensor_is_a_tensor():
    assert as_tensors([TensorSpec("e", "F32", (0, 3), 0, 0)], {"e": memoryview(b"")})["e"].shape == (0, 3)


@given(st.one_of(st.integers(0, 15), st.integers(64, 69)), st.integers(1, 255))
@settings(max_examples=50, deadline=None)
def test_i7_any_changed_byte_changes_the_fingerprint(index: int, change: int):
    data = bytearray(BUFFER)
    data[index] ^= change
    assert fingerprint(SPECS, data) != fingerprint(SPECS, BUFFER)


def test_i7_pieces_of_large_tensors_are_hashed_by_any_number_of_threads_and_none_of_them_may_change_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizes, "PIECE", 4)
    expected = fingerprint(SPECS, BUFFER)
    assert fingerprint(SPECS, BUFFER, threads=3) == expected
    swapped = BUFFER[4:8] + BUFFER[:4] + BUFFER[8:]
    assert swapped != BUFFER and fingerprint(SPECS, swapped) != expected


def test_bytes_between_tensors_order_offsets_and_threads_do_not_count():
    expected = fingerprint(SPECS, BUFFER)
    padded = bytearray(BUFFER)
    padded[20] ^= 1
    assert fingerprint(SPECS, padded) == expected
    assert fingerprint(SPECS[::-1], BUFFER) == expected
    assert fingerprint(SPECS, BUFFER, threads=2) == expected
    moved = (TensorSpec("a", "F32", (2, 2), 6, 16), TensorSpec("b", "BF16", (3,), 0, 6))
    assert fingerprint(moved, BUFFER[64:70] + BUFFER[0:16]) == expected
    assert fingerprint_views(SPECS, {"a": memoryview(BUFFER)[:16], "b": memoryview(BUFFER)[64:70]}) == expected


@pytest.mark.parametrize(
    "changed",
    [TensorSpec("c", "F32", (2, 2), 0, 16), TensorSpec("a", "I32", (2, 2), 0, 16), TensorSpec("a", "F32", (4,), 0, 16)],
)
def test_name_dtype_and_shape_count(changed: TensorSpec):
    assert fingerprint((changed, SPECS[1]), BUFFER) != fingerprint(SPECS, BUFFER)


def test_sizes_and_fingerprints_do_without_torch():
    program = "import sys, midflight.models.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
