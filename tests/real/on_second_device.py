"""What an engine and a trainer compute on a device that is not the CPU: run by test_second_device.py, in a process of its own.

Each deed is done on the CPU and there, and must give the same. A tensor that was left on the CPU, or read without a copy, is an error.
With MIDFLIGHT_TEST_DEVICE=cuda:0 the device is a real GPU: `make test-gpu`.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engines.models import TOKENIZER, MemoryReceiver, ask, make_engine
from tests.engines.reading import collect, ids
from tests.engines.servers.fakes import attached
from tests.engines.servers.own_vllm import StubVllm
from tests.engines.servers.plugin_vllm import PluginVllm
from tests.engines.test_contract import running
from tests.engines.test_scoring import ragged
from tests.models.mixtures import tiny_mixture
from tests.models.tiny import tiny_adapted, tiny_model
from tests.second_device import crossed, here, resident
from tests.second_device import moved as moved_to_ours
from tests.trainer.fixtures import batch, save_checkpoint, trainer
from tests.weights.buckets import Driver, stand_in
from tests.weights.fleets import sent
from transformers import PreTrainedModel

from midflight.config.gpu_memory import CUDA_BYTES, Moment, part_items
from midflight.config.gpus import GPU_KINDS, DescribedGpus
from midflight.config.load import load_config
from midflight.config.sections import Config
from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.embedded.weights import model_fingerprint
from midflight.engines.servers.direct import DirectLoader
from midflight.errors import EngineError, WeightsCorrupt
from midflight.models.creation import make_model
from midflight.models.load import load_model, save_model
from midflight.models.names import as_tensors, in_dtype, named_tensors, outlines
from midflight.run.device_check import inside
from midflight.run.device_check.inside import BenchWorker
from midflight.trainer.checkpoint import load_checkpoint
from midflight.trainer.credit import Scoring
from midflight.trainer.critic import Valuation
from midflight.trainer.model.microbatch import Layout
from midflight.trainer.supervised import SupervisedTrainer
from midflight.trainer.trainer import PolicyTrainer, trainer_of
from midflight.types import Meeting, MemoryPart, PackedBatch, PauseMode, WeightManifest
from midflight.weights.device_digest import digests, lanes
from midflight.weights.manifest import extent
from midflight.weights.transports.broadcast import BroadcastPublisher, VersionOfWeights
from midflight.weights.transports.direct import DirectFeed
from midflight.weights.transports.process_group import BroadcastReceiver
from midflight.weights.transports.publisher import copied
from midflight.weights.transports.select import publisher, receiver

REAL = os.environ.get("MIDFLIGHT_TEST_DEVICE")
DEVICE = torch.device(REAL) if REAL else here()
Make = Callable[[], PreTrainedModel]
REQUESTS = [
    ask("some prompt", request_id="a", seed=3, max_tokens=4),
    ask("another, which is longer", request_id="b", seed=4, max_tokens=6, temperature=0.7, top_p=0.9),
    ask("third", request_id="c", seed=5, max_tokens=4, top_k=4, min_p=0.05),
    ask("fourth", request_id="d", max_tokens=4, temperature=0.0, top_logprobs=3),
    ask(
        "fifth fifth",
        request_id="e",
        max_tokens=6,
        seed=1,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        logit_bias=((97, 5.0),),
        min_tokens=3,
    ),
]
MODELS: dict[str, Make] = {
    "tied": tiny_model,
    "untied": lambda: tiny_model(tied=False),
    "adapters": lambda: tiny_adapted(seed=1),
    "mixture": lambda: tiny_mixture("qwen3_moe"),
}


def moved(model: PreTrainedModel) -> object:
    return model.to(DEVICE) if REAL else moved_to_ours(model)  # pyright: ignore[reportArgumentType]


def both(make: Make) -> tuple[PreTrainedModel, PreTrainedModel]:
    there = moved(make())
    assert isinstance(there, PreTrainedModel) and all(tensor.device == DEVICE for tensor in there.state_dict().values())
    return make(), there


def small(version: int) -> PackedBatch:
    """Of one micro-batch, because each operation is a call of Python."""
    data = batch(seed=version, version=version, num_groups=2, group_size=2, longest=12)
    return replace(data, teacher_logprobs=data.logprobs - 0.1)


def flat(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


# --- The device itself -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(REAL is not None, reason="says of our device what a real one does by itself")
def test_the_device_refuses_what_a_gpu_would() -> None:
    there = torch.zeros(3, 4, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(3, 4\) is on the CPU, and another on the second device"):
        there + torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    assert (there + torch.tensor(2.0)).device == DEVICE and (there + 1).sum().item() == 12.0
    assert there.cpu().numpy().shape == (3, 4) and torch.tensor([1, 2], device=DEVICE).tolist() == [1, 2]


# --- The engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tied", "adapters", "mixture"])
def test_prefill_decode_and_every_way_to_sample(kind: str) -> None:
    here_, there = (make_engine(model, records_experts=kind == "mixture") for model in both(MODELS[kind]))
    for requests in (REQUESTS, REQUESTS[:1]):  # the second time from the prefix that was kept
        for one, other in zip(here_.generate_all(requests), there.generate_all(requests), strict=True):
            assert one.token_ids == other.token_ids
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)


def test_scores_and_answers_from_the_decode_thread() -> None:
    async def main(model: PreTrainedModel) -> tuple[tuple[int, ...], np.ndarray]:
        async with running(make_engine(model)) as engine:
            return ids(await collect(engine, REQUESTS[0])), await engine.score(*ragged(), temperature=0.7)

    (one, scores), (other, scores_there) = (asyncio.run(main(model)) for model in both(tiny_model))
    assert one == other
    np.testing.assert_allclose(scores, scores_there, atol=1e-5)


@pytest.mark.parametrize("make", [tiny_model, tiny_adapted])
def test_a_version_is_staged_committed_attested_and_served(make: Callable[..., PreTrainedModel]) -> None:
    served: list[object] = []
    for model in both(lambda: make(seed=1)):
        source = MemoryReceiver()
        engine = make_engine(model, receiver=source)
        engine._weights.stage(source.publish(2, make(seed=2)))
        attested = engine._commit(2).fingerprint
        assert attested == model_fingerprint(make(seed=2)) == model_fingerprint(model)
        served.append([generated.token_ids for generated in engine.generate_all(REQUESTS[:2])])
    assert served[0] == served[1]


# --- The trainer -----------------------------------------------------------------------------------------------------


def same_steps(made: Callable[[PreTrainedModel], PolicyTrainer], make: Make, *, steps: int = 1) -> None:
    """The same weights but where a gradient is about 0, whose sign is the first step of AdamW."""
    one, other = (made(model) for model in both(make))
    for version in range(steps):
        assert one.step(small(version)).loss == pytest.approx(other.step(small(version)).loss, abs=2e-6)
    assert ((flat(one.model) - flat(other.model)).abs() > 1e-5).double().mean() < 1e-3


@pytest.mark.parametrize("kind", ["untied", "adapters", "mixture"])
def test_steps_with_adamw(kind: str) -> None:
    same_steps(trainer, MODELS[kind], steps=2)


@pytest.mark.parametrize(
    "options",
    [
        ("trainer.activation_checkpointing=true", "trainer.micro_batch_tokens=64"),
        ("objective.kind=ppo", "trainer.updates_per_step=2", "trainer.max_grad_norm=0.1"),
        ("objective.kl_coefficient=0.1", "objective.entropy_coefficient=0.01"),
        ("objective.kind=gspo",),
        ("correction.veto_low=0.0001", "correction.geometric_low=0.5"),
    ],
)
def test_recomputation_references_and_corrections(options: tuple[str, ...]) -> None:
    config = load_config(None, options)
    same_steps(lambda model: trainer_of(config, model), tiny_model)


def test_a_critic_a_teacher_padded_rows_and_the_warm_start() -> None:
    same_steps(lambda model: trainer(model, scoring=Scoring("gae"), valuation=Valuation()), tiny_model)
    same_steps(lambda model: trainer(model, scoring=Scoring(teacher_weight=1.0)), tiny_model)
    same_steps(lambda model: trainer(model, layout=Layout.PADDED), tiny_model)
    one, other = (SupervisedTrainer(model, learning_rate=1e-2) for model in both(tiny_model))
    examples = [((1, 2, 3), (4, 5, 6)), ((7, 8), (9,))]
    for _ in range(2):  # of which the second shows what the first has changed
        assert one.step(examples) == pytest.approx(other.step(examples), abs=1e-5)


def test_a_checkpoint_goes_on_as_if_it_had_not_been_made(tmp_path: Path) -> None:
    _, model = both(tiny_model)
    first = trainer(model)
    first.step(small(0))
    saved = save_checkpoint(tmp_path, first, cursor="", keep=2)
    second = trainer(both(lambda: tiny_model(seed=5))[1])
    load_checkpoint(saved, second)
    for ours in (first, second):
        ours.step(small(1))
    assert torch.equal(flat(first.model), flat(second.model))


# --- Turns -----------------------------------------------------------------------------------------------------------


BUFFERS = 8 * 2**10
"""Bytes of frequencies and counters in both processes, which the estimate leaves to what CUDA takes."""
IN_TURNS = (
    "engine.share=time",
    "engine.device=cuda",
    "trainer.device=cuda",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.max_context=64",
    "engine.max_running=8",
    "engine.max_batch_tokens=64",
    "trainer.micro_batch_tokens=64",
)


@pytest.mark.skipif(REAL is not None, reason="counts the bytes of our device")
def test_what_is_on_the_device_at_each_moment_of_a_turn_is_within_the_dry_runs_estimate() -> None:
    config = load_config(None, IN_TURNS)
    (served, trained), source = [moved(made_of(config)) for _ in range(2)], MemoryReceiver()
    assert isinstance(served, PreTrainedModel) and isinstance(trained, PreTrainedModel)
    engine, ours = make_engine(served, receiver=source), trainer_of(config, trained)
    weights = sum(parameter.nbytes for parameter in made_of(config).parameters())
    ours.leave_device()
    for turn in range(2):
        within(config, Moment.GENERATE, partial(engine.generate_all, REQUESTS[:2]))
        engine._scheduler.pause(PauseMode.ABORT)
        engine._fall_asleep()
        engine._fall_asleep()
        assert weights <= resident.now <= weights + BUFFERS, "the trainer's weights alone"
        peak = within(config, Moment.STEP, partial(step_in_its_turn, ours, turn))
        assert peak >= 4 * weights, "gradients and two moments beside them"
        assert 4 * weights <= resident.now <= 4 * weights + BUFFERS
        manifest = published(source, turn + 1, ours.model)
        ours.leave_device()
        assert weights <= resident.now <= weights + BUFFERS, "moments and gradients have left"
        assert all(value.device.type == "cpu" for state in ours.optimizer.state.values() for value in state.values())
        peak = within(config, Moment.TAKE, partial(take_version, engine, manifest))
        assert peak >= 3 * weights, "the version that is served and the one that comes, beside the trainer's"
        engine._asleep.clear()
        engine._scheduler.resume()
        assert model_fingerprint(served) == model_fingerprint(trained)


def made_of(config: Config) -> PreTrainedModel:
    m = config.model
    sizes = {"hidden_size": m.hidden_size, "intermediate_size": m.intermediate_size, "num_layers": m.num_layers}
    heads = {"num_heads": m.num_heads, "num_kv_heads": m.num_kv_heads}
    return make_model(vocab_size=TOKENIZER.vocab_size, max_context=m.max_context, seed=1, dtype=m.dtype, **sizes, **heads)


def within(config: Config, moment: Moment, deed: Callable[[], object]) -> int:
    """The most bytes that the deed has on the device, which must be within the estimate of that moment."""
    resident.peak = resident.now
    deed()
    gpus = DescribedGpus(GPU_KINDS["h100"], 1)
    items = [item for who in ("trainer", "engine0") for item in part_items(config, gpus, who) if moment in item.moments]
    estimate = sum(item.num_bytes for item in items) - 2 * CUDA_BYTES
    assert resident.peak <= estimate + BUFFERS, f"{moment}: {resident.peak} of {estimate}"
    return resident.peak


def step_in_its_turn(ours: PolicyTrainer, version: int) -> None:
    ours.take_device()
    ours.step(small(version))


def published(source: MemoryReceiver, version: int, model: PreTrainedModel) -> WeightManifest:
    return source.publish_tensors(version, {name: tensor.cpu() for name, tensor in named_tensors(model).items()})


def take_version(engine: EmbeddedEngine, manifest: WeightManifest) -> None:
    engine._weights.take_device()
    engine._weights.stage(manifest)
    assert engine._commit(manifest.version).fingerprint == manifest.fingerprint


@pytest.mark.parametrize("kind", ["untied", "adapters"])
def test_steps_in_turns_give_the_same_bits_as_steps_that_stay(kind: str) -> None:
    stays, leaves = (trainer(both(MODELS[kind])[1]) for _ in range(2))
    for version in range(3):
        stays.step(small(version))
        leaves.take_device()
        leaves.step(small(version))
        leaves.leave_device()
    assert torch.equal(flat(stays.model), flat(leaves.model))


# --- Weights on their way --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full_every", [1, 4])
@pytest.mark.parametrize("kind", ["shared_memory", "pull"])
def test_versions_are_published_whole_and_as_differences(kind: str, full_every: int, tmp_path: Path) -> None:
    _, model = both(tiny_model)
    with publisher(kind, name=f"midflight-test-{tmp_path.name}", folder=tmp_path / "weights", full_every=full_every) as made:
        source = receiver()
        for version in (1, 2):
            with torch.no_grad():
                next(model.parameters())[version].add_(0.5)
            tensors = in_dtype(named_tensors(model), torch.bfloat16)
            manifest = sent(made.publish(version, tensors))
            found = as_tensors(manifest.tensors, source.fetch(manifest))
            assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", ["untied", "adapters"])
def test_a_model_is_written_and_read_again_there(kind: str, tmp_path: Path) -> None:
    plain, model = both(MODELS[kind])
    save_model(model, tmp_path / "model")
    again = load_model(tmp_path / "model", dtype="float32", device=DEVICE)
    assert model_fingerprint(again) == model_fingerprint(plain) and next(again.parameters()).device == DEVICE
    if kind == "adapters":
        save_model(model, tmp_path / "merged", merged=True)
        assert load_model(tmp_path / "merged", dtype="float32").num_parameters() == tiny_model().num_parameters()


# --- From device to device -------------------------------------------------------------------------------------------


class Source:
    """A trainer's model on the device, whose versions leave in bfloat16."""

    def __init__(self) -> None:
        self.model = both(tiny_model)[1]

    def publish(self, sender: BroadcastPublisher, version: int) -> WeightManifest:
        with torch.no_grad():
            next(self.model.parameters()).mul_(1.5)
        return sender.publish(version, outlines(named_tensors(self.model), torch.bfloat16), self._fill)

    def served(self) -> dict[str, torch.Tensor]:
        return {name: tensor.cpu().bfloat16().float() for name, tensor in named_tensors(self.model).items()}

    def _fill(self, places: Mapping[str, torch.Tensor], _: Mapping[str, torch.Tensor]) -> None:
        copied(places, named_tensors(self.model))


def equal(model: PreTrainedModel, expected: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in named_tensors(model).items())


@pytest.mark.skipif(REAL is not None, reason="two members of NCCL must have two GPUs")
def test_a_version_goes_from_the_trainers_device_to_a_workers_through_no_host_memory_and_is_taken_back() -> None:
    """Counted on our device, with gloo in the place of NCCL: no proof of NCCL."""
    source = Source()
    served = both(lambda: tiny_model(seed=5))[1]
    places = [parameter.data_ptr() for parameter in served.parameters()]
    worker = BenchWorker(served)
    first = {name: tensor.cpu() for name, tensor in named_tensors(served).items()}
    made = [first]

    async def main(sender: BroadcastPublisher) -> None:
        feed = DirectFeed()
        for version in (1, 2):
            crossed.clear()
            await feed.bring(source.publish(sender, version), worker)
            sender.release(version)
            worker.buffer.take(version)
            assert (crossed.to_host, crossed.from_host) == (0, 0)
            chosen = {name.partition("_")[0] for name in crossed.chosen}
            assert chosen == {"weights-broadcast", "midflight-direct"}, "a thread begins with the first device"
            made.append(source.served())
            assert equal(served, made[version])
        worker.buffer.take(1)
        assert equal(served, made[1])
        assert [parameter.data_ptr() for parameter in served.parameters()] == places, "recorded graphs hold the addresses"

    with BroadcastPublisher(device=DEVICE, bucket_bytes=5000, quiet_seconds=0.02) as sender:
        asyncio.run(main(sender))
        assert sender.service.num_groups == 1


@pytest.mark.skipif(REAL is not None, reason="counts the bytes of our device")
@pytest.mark.parametrize("has_room", [True, False])
def test_a_version_that_workers_read_on_the_trainers_device_goes_through_no_host_memory_and_is_taken_back(
    has_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stub of vLLM's routes, with files for memory that processes of a GPU share: no proof of CUDA IPC. Without room on the device a
    version goes to host memory once, and from there bucket by bucket to the device."""
    source = Source()
    driver = Driver(tmp_path)
    stand_in(monkeypatch, inside._plugin(), driver)
    stub = PluginVllm([BenchWorker(both(lambda: tiny_model(seed=5))[1]) for _ in range(2)])

    def serves(expected: Mapping[str, torch.Tensor]) -> bool:
        return all(equal(worker.model, expected) for worker in stub.workers)

    async def main(sender: BroadcastPublisher) -> None:
        way = DirectLoader("vllm", DirectFeed())
        async with attached(stub, tmp_path, direct=way) as (engine, _):
            for version in (1, 2):
                crossed.clear()
                manifest = replace(source.publish(sender, version), receivers=1)
                await engine.stage(manifest)
                attested = await engine.commit(version)
                in_float32 = 2 * sum(spec.num_bytes for spec in manifest.tensors)
                expected = (0, 0) if has_room else (in_float32, extent(manifest.tensors))
                assert (crossed.to_host, crossed.from_host) == expected
                assert attested.fingerprint == manifest.fingerprint
                assert manifest.fingerprint.startswith("device-") == has_room
                sender.release(version)
                assert serves(source.served()) and driver.num_open == 0
            before = source.served()
            await engine.stage(replace(source.publish(sender, 3), receivers=1))
            stub.fails_to_swap = True
            with pytest.raises(EngineError, match="It serves version 2 again"):
                await engine.commit(3)
            assert serves(before) and stub.label == "2"

    with BroadcastPublisher(device=DEVICE, backend="handles", bucket_bytes=5000, quiet_seconds=0.02) as sender:
        sender._on_device._fits = has_room
        asyncio.run(main(sender))
    assert len(driver.opened) == 6 and len(driver.given) == 1 and driver.num_given == 0
    assert all(order["bucket"]["handle"] == driver.given[0].handle for order in stub.orders)


@pytest.mark.skipif(REAL is not None, reason="counts the bytes of our device")
def test_in_turns_a_version_is_read_out_of_the_trainers_weights_and_no_copy_of_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    driver = Driver(tmp_path)
    stand_in(monkeypatch, inside._plugin(), driver)
    worker = BenchWorker(both(lambda: tiny_model(seed=5))[1])
    stub = PluginVllm([worker])
    weights = sum(tensor.nbytes for tensor in named_tensors(worker.model).values())

    async def main(sender: BroadcastPublisher) -> None:
        way = DirectLoader("vllm", DirectFeed())
        async with attached(stub, tmp_path, direct=way) as (engine, _):
            for version in (1, 2):
                await engine.pause(PauseMode.ABORT)
                await engine.sleep()
                sender.withdraw()
                gc.collect()
                before = resident.now
                crossed.clear()
                manifest = replace(source.publish(sender, version), receivers=1)
                assert resident.now == before, "the trainer has no copy"
                await engine.wake(MemoryPart.WEIGHTS)
                await engine.stage(manifest)
                await engine.commit(version)
                assert (crossed.to_host, crossed.from_host) == (0, 0)
                assert resident.now >= before + weights, "the version before can be taken back"
                del stub.calls[:]
                await engine.wake(MemoryPart.KEYS)
                said = [body.get("method", path) for path, body in stub.calls]
                assert said.index("midflight_let_go") < said.index("/wake_up"), "keys have its memory"
                await engine.resume()
                assert resident.now == before and equal(worker.model, source.served())
            sender.withdraw()
            with pytest.raises(WeightsCorrupt, match="not published or were released"):
                await engine.stage(replace(manifest, version=3))

    with BroadcastPublisher(device=DEVICE, backend="handles", bucket_bytes=5000, quiet_seconds=0.02, out_of_weights=True) as sender:
        asyncio.run(main(sender))


@pytest.mark.skipif(REAL is not None, reason="counts the bytes of our device")
def test_i7_a_version_whose_tensors_change_while_they_are_sent_is_confirmed_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    stand_in(monkeypatch, inside._plugin(), Driver(tmp_path))
    worker = BenchWorker(both(lambda: tiny_model(seed=5))[1])
    parts = VersionOfWeights.parts

    def torn(version: VersionOfWeights, meets: Meeting, bucket_bytes: int) -> Iterator[torch.Tensor]:
        for number, part in enumerate(parts(version, meets, bucket_bytes)):
            if number == 1:
                sender.withdraw()
                with torch.no_grad():
                    next(source.model.parameters()).mul_(2)
            yield part

    monkeypatch.setattr(VersionOfWeights, "parts", torn)
    with (
        BroadcastPublisher(device=DEVICE, backend="handles", bucket_bytes=5000, quiet_seconds=0.02, out_of_weights=True) as sender,
        pytest.raises(WeightsCorrupt, match="not published or were released"),
    ):
        asyncio.run(DirectFeed().bring(replace(source.publish(sender, 1), receivers=1), worker))


@pytest.mark.skipif(REAL is not None, reason="two members of NCCL must have two GPUs")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("stages", [True, False])
def test_a_servers_own_engine_takes_each_workers_share_through_no_host_memory_and_it_is_taken_back(
    stages: bool, workers: int, tmp_path: Path
) -> None:
    """Against a stub of vLLM's routes, with gloo in the place of NCCL: no proof of NCCL."""
    source = Source()
    first = {name: tensor.cpu() for name, tensor in named_tensors(tiny_model(seed=5)).items()}
    stub = StubVllm(first, workers=workers, device=DEVICE)
    stub.workers[-1].update.can_stage = stages

    async def main(sender: BroadcastPublisher) -> None:
        way = DirectLoader("vllm", DirectFeed(), by_own_engine=True)
        async with attached(stub, tmp_path, direct=way) as (engine, _):

            async def comes(manifest: WeightManifest) -> None:
                crossed.clear()
                await engine.stage(manifest)
                await engine.commit(manifest.version)

            for version in (1, 2):
                manifest = source.publish(sender, version)
                await comes(manifest)
                assert (crossed.to_host, crossed.from_host) == (0, 0)
                assert stub.holds(source.served()) and manifest.fingerprint.startswith("device-")
            served = source.served()
            stub.workers[-1].fails_at = 1
            with pytest.raises(EngineError, match="out of memory" if stages else "It serves version 2 again"):
                await comes(source.publish(sender, 3))
            assert (crossed.to_host, crossed.from_host) == (0, 0)
            assert stub.holds(served) and stub.label == "2"

    with BroadcastPublisher(device=DEVICE, bucket_bytes=5000, quiet_seconds=0.02) as sender:
        asyncio.run(main(sender))


@pytest.mark.skipif(REAL is not None, reason="counts the bytes of our device")
def test_an_engine_that_has_no_device_or_comes_late_gets_the_version_from_host_memory() -> None:
    source = Source()
    with BroadcastPublisher(device=DEVICE, bucket_bytes=5000, quiet_seconds=0.02) as sender:
        manifests = [source.publish(sender, 1)]
        expected = [source.served()]
        manifests.append(source.publish(sender, 2))
        expected.append(source.served())
        assert all(manifest.fingerprint.startswith("device-") for manifest in manifests)
        reader = BroadcastReceiver()
        for manifest, tensors in zip(manifests, expected, strict=True):
            found = as_tensors(manifest.tensors, reader.fetch(manifest))
            assert all(torch.equal(found[name].float(), tensor) for name, tensor in tensors.items())
        damaged = replace(manifests[1], fingerprint=manifests[1].fingerprint[:-1] + "x")
        sender._held[2] = replace(sender._held[2], fingerprint=damaged.fingerprint)
        with pytest.raises(WeightsCorrupt, match="its bytes hash to"):
            reader.fetch(damaged)

        worker = BenchWorker(both(lambda: tiny_model(seed=5))[1])
        asyncio.run(DirectFeed().bring(manifests[0], worker))  # the older one, which has left the device
        worker.buffer.take(1)
        assert equal(worker.model, expected[0])


def test_a_digest_is_the_same_on_every_device_and_tells_what_was_torn_lost_or_mixed_up() -> None:
    draw = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (100_003,), dtype=torch.uint8, generator=draw)
    there = data.to(DEVICE)

    def digest(part: torch.Tensor) -> str:
        return digests([lanes(part)], [len(part)])[0]

    for place in (slice(0, None), slice(8, 4008), slice(3, 77), slice(5, 6), slice(0, 0)):
        assert digest(data[place]) == digest(there[place])
    whole = digest(data)
    spoilt = data.clone()
    spoilt[50_000] ^= 1
    swapped = data.clone()
    swapped[0:8], swapped[8:16] = data[8:16], data[0:8]
    longer = torch.cat([data, torch.zeros(1, dtype=torch.uint8)])
    for other in (spoilt, swapped, data[:-1], longer):
        assert digest(other) != whole
