"""What a trainer may say, and when."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from peft import PeftModel
from safetensors.numpy import save_file
from tests.models.tiny import tiny_adapted
from transformers import AutoModelForCausalLM

from midflight.errors import OutOfTurn, RequestRejected, UnknownLease
from midflight.models.adapters import FOLDER, WEIGHTS
from midflight.models.load import save_model
from midflight.models.names import named_tensors
from midflight.run.api.model_tensors import ModelTensors
from midflight.run.api.step_book import DoneBody, StepBook
from midflight.types import Batch, PackedBatch, TensorSpec, WeightManifest
from midflight.weights.transports.posted_files import manifest_of, read_specs


def batch(lease: int, train_version: int) -> PackedBatch:
    """Three tokens, of which two are trained."""
    empty = np.zeros(0, np.int32)
    return PackedBatch(
        lease, train_version, empty, np.array([False, True, True]), np.zeros(0, np.float32), empty, empty, empty, empty,
        np.zeros(0, np.float32), empty, np.zeros(0, np.bool_),
    )  # fmt: skip


def weights(version: int, fingerprint: str = "f") -> WeightManifest:
    return WeightManifest(version, fingerprint, "file", "x", ())


def test_what_a_trainer_leaves_unsaid_is_filled_in_and_a_step_is_done_once() -> None:
    book = StepBook(start_version=4)
    book.check_take(4)
    book.taken(batch(7, 4), now=10.0)
    step = book.report(DoneBody(7, 5), now=12.5)
    assert (step.started, step.ended, step.num_tokens) == (10.0, 12.5, 2)
    said = book.report(DoneBody(7, 5, started=11.0, ended=12.0, num_tokens=9, metrics={"loss": 1.0}), now=12.5)
    assert (said.started, said.ended, said.num_tokens, said.metrics) == (11.0, 12.0, 9, {"loss": 1.0})
    book.done(step)
    with pytest.raises(UnknownLease):
        book.report(DoneBody(7, 5), now=13.0)


def test_a_step_made_on_a_machine_with_another_clock_is_told_by_ours_and_so_after_the_trainer_has_moved() -> None:
    """The trainer's clock is 100 s behind ours; it reports half a second after the step's end. Then it is elsewhere, 40 s ahead."""
    book = StepBook(start_version=4)
    book.taken(batch(7, 4), now=200.0)
    said = DoneBody(7, 5, started=101.0, ended=103.0, now=103.5)
    step = book.report(said, now=203.5)
    assert (step.started, step.ended) == (201.0, 203.0)
    book.done(step, said)
    book.restarted(5)
    book.taken(batch(8, 5), now=300.0)
    step = book.report(DoneBody(8, 6, started=342.0, ended=344.0, now=344.0), now=304.0)
    assert (step.started, step.ended) == (302.0, 304.0)


def test_versions_and_leases_out_of_turn_are_refused_and_change_nothing() -> None:
    book = StepBook(start_version=0)
    with pytest.raises(OutOfTurn, match="ask for 1 at most"):
        book.check_take(2)
    book.taken(batch(1, 0), now=0.0)
    for version in (0, 2):
        with pytest.raises(OutOfTurn, match="makes 1"):
            book.report(DoneBody(1, version), now=1.0)
    with pytest.raises(OutOfTurn, match="`done` first"):
        book.publishing(weights(1))
    book.check_take(1)
    book.taken(batch(2, 1), now=1.0)
    book.check_take(2)  # our own trainer draws ahead before it has reported the step
    book.done(book.report(DoneBody(1, 1), now=2.0))
    book.publishing(weights(1))
    book.publishing(weights(1))
    with pytest.raises(OutOfTurn, match="other weights"):
        book.publishing(weights(1, "other"))
    book.done(book.report(DoneBody(2, 2), now=3.0))
    book.publishing(weights(2))
    with pytest.raises(OutOfTurn, match="only grow"):
        book.publishing(weights(1))


def model_folder(tmp_path: Path, *, tied: str) -> Path:
    (tmp_path / "config.json").write_text("{" + tied + "}")
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_weights_that_do_not_fit_the_model_are_refused_by_name_before_any_engine_sees_them(tmp_path: Path) -> None:
    tensors = ModelTensors.of(model_folder(tmp_path, tied='"tie_word_embeddings": true, "other": 1'))
    path = tmp_path / "new.safetensors"
    a, b = np.ones((2, 3), np.float32), np.ones(4, np.float32)

    def published() -> WeightManifest:
        return manifest_of(path, version=3, fitting=tensors.fitting)

    save_file({"a": a, "b": b}, path)
    plain = published()
    assert [s.name for s in plain.tensors] == ["a", "b"] and plain.location == str(path)
    save_file({"a": a, "b": b, "lm_head.weight": a}, path)
    assert published().fingerprint == plain.fingerprint, "the embedding's second name is left out"
    for wrong, words in (({"a": a}, "'b' is missing"), ({"a": a, "b": a}, r"'b' has shape"), ({"a": a, "b": b, "c": b}, "no tensor 'c'")):
        save_file(wrong, path)
        with pytest.raises(RequestRejected, match=words):
            published()


@pytest.mark.parametrize(
    "data",
    [b"", b"short", b"\xff" * 40, b"\x02" + b"\0" * 7 + b"[]", b"\x50" + b"\0" * 7 + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(80),
     b"\x50" + b"\0" * 7 + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'.ljust(80) + b"\0" * 8,
     b"\x50" + b"\0" * 7 + b'{"a":{"dtype":"X9","shape":[2],"data_offsets":[0,8]}}'.ljust(80) + b"\0" * 8],
    ids=["empty", "short", "long header", "no object", "cut", "extent", "dtype"],
)  # fmt: skip
def test_a_file_that_is_no_whole_safetensors_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(RequestRejected, match="publishing version 1"):
        manifest_of(path, version=1, fitting=lambda specs: specs)
    with pytest.raises(RequestRejected, match="No such file"):
        manifest_of(tmp_path / "missing", version=1, fitting=lambda specs: specs)


def test_specs_count_offsets_from_the_beginning_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.arange(4, dtype=np.int32)}, path)
    (spec,) = read_specs(path)
    assert np.frombuffer(path.read_bytes()[spec.offset :][: spec.num_bytes], np.int32).tolist() == [0, 1, 2, 3]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestRejected, match="it is no file"):
        manifest_of(tmp_path / "pipe", version=1, fitting=lambda specs: specs)


def test_a_file_that_its_trainer_cuts_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"w": np.ones(100_000, np.float32)}, path)

    def cutting(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        os.truncate(path, 1000)
        return specs

    with pytest.raises(RequestRejected, match="it ends within tensor 'w'"):
        manifest_of(path, version=1, fitting=cutting)


def test_a_file_of_adapters_that_peft_saved_fits_a_model_with_adapters_and_whole_weights_do_not(tmp_path: Path) -> None:
    save_model(tiny_adapted(seed=1), tmp_path / "model")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "model" / FOLDER)
    theirs.save_pretrained(tmp_path / "saved")
    tensors = ModelTensors.of(tmp_path / "model")
    manifest = manifest_of(tmp_path / "saved" / WEIGHTS, version=1, fitting=tensors.fitting)
    assert {spec.name for spec in manifest.tensors} == named_tensors(tiny_adapted()).keys()
    with pytest.raises(RequestRejected, match=r"no tensor 'model\.embed_tokens\.weight'"):
        manifest_of(tmp_path / "model" / "model.safetensors", version=1, fitting=tensors.fitting)


def test_a_gateway_that_died_knows_its_leases_again_and_takes_a_report_that_it_had_answered_for_a_repetition() -> None:
    book = StepBook(start_version=0)
    book.go_on([Batch(3, 6, ())], next_version=7, now=50.0)
    assert book.repeats(DoneBody(2, 6)) and not book.repeats(DoneBody(3, 7))
    step = book.report(DoneBody(3, 7), now=52.0)
    assert (step.started, step.num_tokens) == (50.0, 0)
    book.done(step)
    assert book.repeats(DoneBody(3, 7))
    book.check_take(8)
    with pytest.raises(OutOfTurn, match="ask for 8 at most"):
        book.check_take(9)
    book.check_saved(7)
    assert not StepBook(start_version=7).repeats(DoneBody(2, 6)), "one that began anew answers for every lease"
