"""What truncation keeps of the vocabulary is recorded for each token, in few bytes, and travels with it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines.models import ask, make_engine
from tests.engines.test_sampler import batch
from tests.models.tiny import tiny_model
from transformers import PreTrainedModel

from midflight.engines.embedded.sampler import SamplingBatch, sample
from midflight.engines.streams import ChunkStream, ChunkStreams, StepOutput
from midflight.engines.wire import StepFrame, can_carry, decode_engine_frame, encode, pack_chunks, pack_step, step_kept
from midflight.testing.virtual_time import run_virtual
from midflight.types import Chunk, GenerateRequest
from midflight.types.sampling_masks import kept_ids, pack_kept, unpack_kept


def sets(records: list[bytes]) -> list[list[int]]:
    return kept_ids(np.frombuffer(b"".join(records), np.uint8), np.array([len(r) for r in records]))


def mask(vocab_size: int, *rows: set[int]) -> np.ndarray:
    found = np.zeros((len(rows), vocab_size), np.bool_)
    for row, ids in enumerate(rows):
        found[row, list(ids)] = True
    return found


def test_a_record_by_hand() -> None:
    # 5, then gaps of 2 and 293 = 2 * 128 + 37, lowest seven bits first; of eight ids the three first ones are an eighth or more: bits.
    assert pack_kept(mask(100_000, {5, 7, 300})) == [bytes([0, 5, 2, 128 + 37, 2])]
    assert pack_kept(mask(8, {0, 1, 2})) == [bytes([1, 0b111])]
    assert pack_kept(mask(3, {0, 1, 2})) == [b""]


@settings(deadline=None, max_examples=80)
@given(st.data(), st.sampled_from([1, 7, 8, 9, 200, 3000, 200_000]))
def test_records_give_back_the_ids_in_at_most_a_bit_for_each_of_the_vocabulary(data: st.DataObject, vocab_size: int) -> None:
    rows = data.draw(st.lists(st.sets(st.integers(0, vocab_size - 1), min_size=1, max_size=60), max_size=5))
    records = pack_kept(mask(vocab_size, *rows))
    whole = set(range(vocab_size))
    assert sets(records) == [[] if ids == whole else sorted(ids) for ids in rows]
    assert all(len(record) <= 1 + -(-vocab_size // 8) for record in records)


@pytest.mark.parametrize(
    ("data", "lengths"), [(b"\x00\x85", [2]), (b"\x07\x01", [2]), (b"\x00\x05", [3]), (b"\x00\x85\x00\x01", [2, 2]), (b"\x00" + b"\x80" * 6 + b"\x01", [8])]
)  # fmt: skip
def test_bytes_that_are_no_records_are_refused(data: bytes, lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"record|gap"):
        unpack_kept(np.frombuffer(data, np.uint8), np.array(lengths, np.int64))


# --- The sampler ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (batch(1, top_k=2), [0, 1]),
        (batch(1, top_p=0.75), [0, 1, 2]),
        (batch(1, min_p=0.45), [0, 1, 2]),
        (batch(1, top_k=3, top_p=0.7), [0, 1]),  # of .4, .3, .2, renormalised: .44 + .33 hold .7
        (batch(1, temperature=0.5, min_p=0.2), [0, 1, 2]),  # squared: .16, .09, .04, .01, and a fifth of .16 is .032
        (batch(1, temperature=2.0, min_p=0.6, top_k=3, top_p=0.999), [0, 1, 2]),  # roots: .63, .55, .45, .32 and .6 * .63 = .38
        (batch(1, top_p=1.0), []),
    ],
)
def test_the_sampler_records_what_it_kept(asked: SamplingBatch, expected: list[int]) -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    sampled = sample(logits, replace(asked, wants_kept=np.array([True])))
    assert sampled.kept[0] is not None and sets([sampled.kept[0]]) == [expected]
    plain = sample(logits, asked)
    assert (
        plain.kept == () and plain.token_ids.tolist() == sampled.token_ids.tolist() and plain.logprobs.tolist() == sampled.logprobs.tolist()
    )


def test_rows_that_do_not_ask_have_no_record() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(3, -1)
    found = sample(logits, replace(batch(3, top_k=1), wants_kept=np.array([False, True, False]))).kept
    assert found == (None, bytes([1, 1]), None)


# --- The engine and its wire ------------------------------------------------------------------------------------------


def pointed() -> PreTrainedModel:
    """A tiny model that does not find all tokens alike."""
    model = tiny_model(tied=False)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8.0)
    return model


def wanting(request: GenerateRequest) -> GenerateRequest:
    return replace(request, wants_kept=True)


def test_the_engines_log_probabilities_are_those_over_the_recorded_set() -> None:
    model = pointed()
    sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.005, "max_tokens": 12}
    requests = [wanting(ask(f"hello {k}", request_id=str(k), seed=k, **sampling)) for k in range(4)]
    for request, found in zip(requests, make_engine(model).generate_all([*requests, ask("beside")]), strict=False):
        ids = torch.tensor([[*request.input_ids, *found.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(request.input_ids) - 1 : -1].double() / 0.8
        assert len(found.kept) == len(found.token_ids) == 12
        for z, token, logprob, kept in zip(logits, found.token_ids, found.logprobs, sets(list(found.kept)), strict=True):
            assert token in kept and 1 <= len(kept) <= 30
            assert logprob == pytest.approx(float(z[token] - z[kept].logsumexp(0)), abs=1e-5)


def test_i5_a_resumed_request_has_the_records_of_an_unbroken_one() -> None:
    model, request = pointed(), wanting(ask("abc", top_p=0.8, seed=3, max_tokens=10))
    (whole,) = make_engine(model).generate_all([request])
    (rest,) = make_engine(model).generate_all([replace(request, input_ids=(*request.input_ids, *whole.token_ids[:4]))])
    assert rest.token_ids == whole.token_ids[4:] and rest.kept == whole.kept[4:]


KEPT = StepOutput(
    version=3,
    handles=np.array([11, 12, 13]),
    token_ids=np.array([5, 6, 7]),
    logprobs=np.array([-0.5, -1.5, -2.5]),
    kv_versions=np.array([3, 3, 3]),
    kept=(b"\x00\x05", None, b""),
    outlets=np.array([1, 2, 1]),
)


def test_records_arrive_with_their_tokens() -> None:
    frame = decode_engine_frame(encode(pack_step(KEPT, {11: 1, 12: 2, 13: 3})))
    assert isinstance(frame, StepFrame) and step_kept(frame) == [b"\x00\x05", None, b""]
    assert KEPT.for_outlet(1).kept == (b"\x00\x05", b"") and KEPT.for_outlet(2).kept == (None,)
    chunks = [(1, Chunk((5, 6), (-0.5, -1.0), 3, 3, kept=(b"\x00\x05", b""))), (2, Chunk((9,), (-1.0,), 3, 3))]
    assert step_kept(pack_chunks(chunks, started=0.0, ended=1.0, num_running=1)) == [b"\x00\x05", b"", None]
    assert not can_carry(msgspec.structs.replace(chunks[0][1], kept=(b"",)))


def test_a_request_that_did_not_ask_gets_no_records_of_its_neighbours_step() -> None:
    async def main() -> None:
        streams = ChunkStreams()
        opened = {handle: ChunkStream(eager=True) for handle in (11, 12)}
        for handle, stream in opened.items():
            streams.open(handle, stream)
        streams.put(KEPT)
        found = {handle: (await anext(stream)).kept for handle, stream in opened.items()}
        assert found == {11: (b"\x00\x05",), 12: ()}

    run_virtual(main())
