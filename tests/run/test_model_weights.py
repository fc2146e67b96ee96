"""What leaves the trainer: numbered before it can be fetched, in the precision that engines serve in."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from midflight.models.creation import make_model
from midflight.models.names import in_dtype, named_tensors
from midflight.run.trainer.trainer_process import ModelWeights, PublishedVersions, put_together, sending_host
from midflight.types import Version, WeightManifest
from midflight.weights.transports.publisher import Fill, copied
from midflight.weights.transports.shared_memory import SharedMemoryPublisher

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_context": 32}


@pytest.mark.parametrize(("served", "name", "size"), [("float32", "F32", 4), ("bfloat16", "BF16", 2)])
def test_weights_leave_in_the_served_precision(tmp_path: Path, served: str, name: str, size: int) -> None:
    model = make_model(vocab_size=262, seed=0, dtype="float32", **SIZES)
    with SharedMemoryPublisher("midflight-test-dtype", folder=tmp_path) as publisher:
        put = put_together(lambda: named_tensors(model), publisher, dtype=served)
        manifest = ModelWeights(put, PublishedVersions(tmp_path / "published")).publish(1)
    tensors = named_tensors(model)
    assert {spec.dtype for spec in manifest.tensors} == {name}
    assert sum(spec.num_bytes for spec in manifest.tensors) == size * sum(tensor.numel() for tensor in tensors.values())
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values()), "the trainer's own stay as they are"


def test_only_what_is_in_another_precision_is_copied_and_whole_numbers_stay() -> None:
    given: Mapping[str, Tensor] = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16), "n": torch.ones(2, dtype=torch.int64)}
    made = in_dtype(given, torch.bfloat16)
    assert made["a"].dtype == torch.bfloat16 and made["b"] is given["b"] and made["n"] is given["n"]


class Slow:
    """A publisher that is busy until it is told to go on; it notes what it is asked, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.busy, self.go_on = threading.Event(), threading.Event()

    def publish(self, version: Version, tensors: Mapping[str, Tensor], fill: Fill = copied) -> WeightManifest:
        self.asked.append(f"publish {version}")
        self.busy.set()
        assert self.go_on.wait(10)
        self.asked.append(f"published {version}")
        return WeightManifest(version, "", "file", "", ())

    def release(self, version: Version) -> None:
        self.asked.append(f"release {version}")


def test_i2_the_number_of_a_version_that_was_passed_over_is_not_used_again(tmp_path: Path) -> None:
    published = PublishedVersions(tmp_path / "published")
    outlet = ModelWeights(put_together(dict, Slow(), dtype="float32"), published)
    published.note(4)
    outlet.pass_over(5)
    outlet.pass_over(6)
    assert PublishedVersions(tmp_path / "published").resumed_as(4) == 7, "5 and 6 were other weights"


def test_a_version_released_during_a_publication_is_given_back_before_the_next(tmp_path: Path) -> None:
    model = make_model(vocab_size=262, seed=0, dtype="float32", **SIZES)
    put = put_together(lambda: named_tensors(model), publisher := Slow(), dtype="float32")
    outbox = ModelWeights(put, PublishedVersions(tmp_path / "published"))
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(outbox.publish, 2)
        assert publisher.busy.wait(10)
        outbox.release(0)
        outbox.release(1)
        publisher.go_on.set()
        publishing.result(10)
    outbox.publish(3)
    assert publisher.asked == ["publish 2", "published 2", "release 0", "release 1", "publish 3", "published 3"]


def test_a_broadcast_is_reached_where_the_gateway_is_if_the_trainer_is_on_loopback() -> None:
    cases = {
        ("127.0.0.1", "127.0.0.1"): "127.0.0.1",
        ("10.0.0.1", "127.0.0.1"): "10.0.0.1",
        ("0.0.0.0", "127.0.0.1"): "127.0.0.1",
        ("::", "127.0.0.1"): "127.0.0.1",
        ("localhost", "127.0.0.1"): "127.0.0.1",
        ("10.0.0.1", "10.0.0.2"): "10.0.0.2",
    }
    assert {case: sending_host(*case) for case in cases} == cases
