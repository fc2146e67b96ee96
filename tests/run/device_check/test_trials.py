"""The trials can fail: each is made here with a fault where it looks. The whole check on a device is in tests/real/test_device_check.py."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from midflight.engines.embedded.engine import EmbeddedEngine, Generated
from midflight.errors import RunFailed
from midflight.run.device_check import inside, kernels, sameness, servers, speeds, swaps
from midflight.run.device_check.bench import REAL, SMALL, Bench, Found, Wrong, not_tried, requests, tried, within
from midflight.run.device_check.report import DeviceTrial, TrialOutcome
from midflight.run.device_check.swaps import SwappedAnswer, answered_across, checked_answer
from midflight.run.device_check.table import PARTS
from midflight.trainer.model import policy
from midflight.types import Attestation, Chunk, GenerateRequest, PauseMode, WeightManifest
from midflight.weights.transports import file_receiver

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture
def bench(scratch: Path) -> Bench:
    return Bench(CPU, scratch)


@pytest.fixture(autouse=True)
def any_order() -> Iterator[None]:
    """Trials of determinism set a switch of their process, which ends with them."""
    yield
    torch.use_deterministic_algorithms(False)


def failed(trials: Iterable[DeviceTrial]) -> list[str]:
    return [trial.what for trial in trials if trial.outcome is TrialOutcome.FAILED]


def test_a_trial_keeps_what_was_found_its_error_or_the_reason() -> None:
    assert tried("a", lambda: "5", remedy="r").found == "5"
    found = tried("a", lambda: Found("5", "7"), remedy="r")
    assert (found.outcome, found.limit, found.remedy) == (TrialOutcome.WORKS, "7", "")

    def breaks() -> str:
        raise RuntimeError("no kernel image")

    broken = tried("a", breaks, remedy='set trainer.device = "cpu"')
    assert (broken.outcome, broken.found, broken.remedy) == (
        TrialOutcome.FAILED,
        "RuntimeError: no kernel image",
        'set trainer.device = "cpu"',
    )

    def breaks_in_a_group() -> str:
        raise ExceptionGroup("unhandled errors in a TaskGroup", [Wrong("the server ended")])

    assert tried("a", breaks_in_a_group, remedy="r").found == "the server ended"
    assert not_tried("a", "no GPU").outcome is TrialOutcome.NOT_TRIED
    assert within(0.5, 1.0, "nats") == "0.5 nats"
    for number in (1.5, float("nan")):
        with pytest.raises(Wrong, match="at most 1 are rounding"):
            within(number, 1.0, "nats")


def test_trials_of_a_server_are_told_as_they_end_and_an_error_after_them_is_raised() -> None:
    went_on: list[str] = []

    async def trials() -> AsyncGenerator[DeviceTrial]:
        yield not_tried("one", "")
        await asyncio.sleep(0.05)
        went_on.append("to two")
        yield not_tried("two", "")
        raise RuntimeError("it died")

    coming = servers.as_they_come(trials())
    assert next(coming).what == "one" and not went_on
    assert next(coming).what == "two"
    with pytest.raises(RuntimeError, match="it died"):
        next(coming)


class DeadServer:
    """A server that ends before it answers."""

    url = "http://127.0.0.1:9"
    works = None

    async def died(self) -> NoReturn:
        raise RunFailed("the server ended with signal SIGKILL")


def test_a_server_that_ends_while_it_is_tried_is_said_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody starts it again, so that a trial would wait for it until the part must end."""

    @asynccontextmanager
    async def started(*given: Any, **named: Any) -> AsyncGenerator[DeadServer]:
        yield DeadServer()

    monkeypatch.setattr(servers, "started", started)
    at = servers.ServerBench(bench, "sglang", Path(sys.executable))
    (trial,) = servers.small(at)
    assert (trial.what, trial.outcome) == ("SGLang (small): it starts", TrialOutcome.FAILED)
    assert trial.found == "the server ended with signal SIGKILL"


def test_what_a_cpu_cannot_try_is_said_with_its_reason(bench: Bench) -> None:
    said = {trial.what: trial.found for trial in speeds.limits(bench) if trial.outcome is TrialOutcome.NOT_TRIED}
    assert said == {"copies to and from the host": "its memory is the host's"}
    assert [size.name for size in bench.sizes] == ["small"] and bench.why_not_real.startswith("cpu is no GPU")


def test_a_forward_of_the_trainer_that_is_off_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = policy.token_scores

    def off(*given: Any, **named: Any) -> Any:
        scores = whole(*given, **named)
        return scores._replace(logprobs=scores.logprobs + 0.01) if hasattr(scores, "_replace") else (scores[0] + 0.01, *scores[1:])

    monkeypatch.setattr(policy, "token_scores", off)
    assert f"packed rows and their gradient in float32, beside the model's own ({SMALL.name})" in failed(kernels.trainer_kernels(bench))


def noisy(answer: Generated, noise: float) -> Generated:
    return replace(answer, logprobs=tuple(logprob + noise for logprob in answer.logprobs))


@pytest.mark.parametrize(
    ("part", "what"),
    [
        (kernels.engine_kernels, f"the log-probability of each token, computed again in float32 ({SMALL.name})"),
        (sameness.sameness, "the same requests twice in float32: tokens and log-probabilities to the bit"),
    ],
)
def test_log_probabilities_of_the_engine_that_are_off_are_found(
    part: Callable[[Bench], Iterator[DeviceTrial]], what: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = EmbeddedEngine.generate_all, list[int]()

    def off(engine: EmbeddedEngine, asked: Any) -> list[Generated]:
        calls.append(len(asked))
        return [noisy(answer, 0.01 * len(calls)) for answer in whole(engine, asked)]

    monkeypatch.setattr(EmbeddedEngine, "generate_all", off)
    assert what in failed(part(bench))


def test_an_answer_whose_tokens_are_said_to_be_of_another_version_is_found(bench: Bench) -> None:
    models = (bench.model(SMALL), bench.model(SMALL, seed=1))
    (request,) = requests(SMALL, 1)
    output = list(range(40, 52))
    for mode in swaps.MODES:
        right = swaps.across(models, request.input_ids, output, number=5, mode=mode).tolist()
        versions = [0] * 5 + [1] * 7
        assert "5 tokens of the version before and 7 of the new one" in checked_answer(
            models, request, SwappedAnswer(output, right, versions), mode
        )
        for wrong in ([0] * 6 + [1] * 6, [0] * 12, [1] + [0] * 5 + [1] * 6):
            with pytest.raises(Wrong):
                checked_answer(models, request, SwappedAnswer(output, right, wrong), mode)
    keep, recompute = (swaps.across(models, request.input_ids, output, number=5, mode=mode) for mode in swaps.MODES)
    assert PauseMode.KEEP is swaps.MODES[0] and (keep[:5] == recompute[:5]).all() and abs(keep[6:] - recompute[6:]).max() > 1e-3


def test_damage_that_a_receiver_does_not_find_and_a_swap_that_is_not_made_are_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed(swaps.take_back(bench)) == failed(inside.inside_workers(bench)) == []
    monkeypatch.setattr(file_receiver, "verify", lambda *given, **named: None)
    assert "a damaged version is refused, and the one before is served" in failed(swaps.take_back(bench))
    monkeypatch.setattr(inside._plugin(), "exchange", lambda model, other: other)
    assert len(failed(inside.inside_workers(bench))) == 1


class FastServer:
    """A server whose answer ends while a version is still being staged."""

    def __init__(self) -> None:
        self._version = 0
        self._coming: WeightManifest | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        made = asyncio.Queue[Chunk]()

        async def make() -> None:
            for token in range(40):
                made.put_nowait(Chunk((token,), (-1.0,), self._version, self._version))
                await asyncio.sleep(0.001)

        making = asyncio.create_task(make())
        for _ in range(40):
            yield await made.get()
        await making

    async def stage(self, manifest: WeightManifest) -> None:
        await asyncio.sleep(0.5)
        self._coming = manifest

    async def pause(self, mode: PauseMode) -> None: ...

    async def commit(self, version: int) -> Attestation:
        assert self._coming is not None
        self._version = version
        return Attestation(version, self._coming.fingerprint)

    async def resume(self) -> None: ...


def test_a_version_comes_in_the_middle_of_an_answer_that_is_made_faster_than_a_version_is_staged() -> None:
    coming = WeightManifest(1, "a fingerprint", "shared_memory", "", ())
    answer = asyncio.run(answered_across(FastServer(), requests(SMALL, 1)[0], coming, PauseMode.KEEP))  # type: ignore[arg-type]
    assert set(answer.versions) == {0, 1} and answer.versions == sorted(answer.versions)


@dataclass
class SleepyServer:
    """The bench of a server on a GPU of 140 GB that has 5 GB for keys. Others take or leave memory while it falls asleep."""

    gives_back: float
    others: Sequence[float]
    """GB that others leave as it falls asleep, each time."""
    kind: str = "vllm"
    bench: Any = None
    key_bytes: int = 5 * 2**30
    free: float = 40.0
    asleep: int = 0

    def config(self, **given: Any) -> None: ...

    @asynccontextmanager
    async def attached(self, size: Any, config: None) -> AsyncGenerator[Any]:
        yield type("Attached", (), {"engine": None, "url": ""})

    def memory(self, device: Any) -> tuple[int, int]:
        return int(self.free * 2**30), 140 * 2**30

    def post(self, route: str) -> None:
        if "sleep" in route:
            self.free += self.gives_back + self.others[self.asleep]
            self.asleep += 1
        else:
            self.free -= self.gives_back


@pytest.mark.parametrize(
    ("gives_back", "others", "works"),
    [(5, [0] * 5, True), (5, [0, -16, -16, 0, 0], True), (1, [0] * 5, False), (0, [0, 16, 0, 16, 0], False)],
)
def test_a_sleeping_server_must_give_back_its_memory_for_keys_whatever_others_take_and_leave(
    gives_back: float, others: Sequence[float], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = SleepyServer(gives_back, others)
    at.bench = type("Bench", (), {"device": None})

    async def said(engine: Any) -> list[int]:
        return [1, 2]

    monkeypatch.setattr(servers, "_said", said)
    monkeypatch.setattr(servers, "_post", at.post)
    monkeypatch.setattr(torch.cuda, "mem_get_info", at.memory)
    words = f"{gives_back}.0 GB were given back; it had 5.0 GB for keys and values"
    if works:
        assert asyncio.run(servers._slept(at)).startswith(words)  # type: ignore[arg-type]
    else:
        with pytest.raises(Wrong, match=words):
            asyncio.run(servers._slept(at))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("vllm", ["--gpu-memory-utilization=0.094", f"--kv-cache-memory-bytes={5 * 2**29}"]),
        # a token has two layers of one head of 64 numbers, keys and values in float32
        ("sglang", ["--mem-fraction-static=0.375", f"--max-total-tokens={5 * 2**29 // (2 * 64 * 2 * 4)}"]),
    ],
)
def test_a_server_takes_three_quarters_of_its_parts_memory_a_third_of_it_for_keys(
    kind: str, words: Sequence[str], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 2**30, 80 * 2**30))
    bench = Bench(torch.device("cuda"), scratch, room=10 * 2**30)
    config = servers.ServerBench(bench, kind, Path(sys.executable)).config(size=SMALL, arguments=["--first"])
    assert config.engine.arguments == ("--first", *words)


def test_a_server_on_a_cpu_is_told_nothing_of_memory(bench: Bench) -> None:
    assert servers.ServerBench(bench, "vllm", Path(sys.executable)).config(size=SMALL).engine.arguments == ()


def test_the_real_size_is_tried_where_the_part_has_memory_for_it(scratch: Path) -> None:
    gpu = Bench(torch.device("cuda"), scratch, room=REAL.needs)
    assert gpu.sizes == (SMALL, REAL) and not gpu.why_not_real
    small = replace(gpu, room=REAL.needs - 1)
    assert small.sizes == (SMALL,) and "of cuda are free, and the real size takes" in small.why_not_real


def test_two_processes_that_want_one_model_make_it_once(tmp_path: Path) -> None:
    program = """
import sys, torch
from pathlib import Path
from midflight.run.device_check import bench
made = bench.make_model
def counted(**given):
    print("made", flush=True)
    return made(**given)
bench.make_model = counted
model = bench.Bench(torch.device("cpu"), Path(sys.argv[1])).model(bench.SMALL)
print(float(sum(p.double().sum() for p in model.parameters())), flush=True)
"""
    words = [sys.executable, "-c", program, str(tmp_path)]
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0].splitlines() for process in processes]
    assert sorted(len(lines) for lines in said) == [1, 2] and said[0][-1] == said[1][-1]


def test_a_step_in_one_order_is_asked_for_before_the_first_product_of_its_process(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def stepped(bench: Bench) -> torch.Tensor:
        done.append("step")
        return torch.ones(2)

    monkeypatch.setattr(sameness, "compute_in_one_order", lambda: done.append("one order"))
    monkeypatch.setattr(sameness, "stepped", stepped)
    assert not failed(sameness.one_order(bench)) and done == ["one order", "step", "step"]
    done.clear()
    monkeypatch.setattr(sameness, "same_step", lambda bench: "")
    assert len([*sameness.sameness(bench)]) == 5 and not done


STEP_SECONDS = 0.05
"""A decode step of our engine with half a billion weights took so long on an H200."""


def test_the_speeds_of_decoding_in_real_size_take_a_third_of_their_parts_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list[int]()

    class Decodes:
        def generate_all(self, asked: Sequence[GenerateRequest]) -> None:
            steps.append(max(request.sampling.max_tokens for request in asked))

    class Stub:
        seconds = Bench.seconds

        def model(self, size: Any, **named: Any) -> torch.nn.Module:
            return torch.nn.Linear(2, 2)

        def engine(self, model: Any, size: Any) -> Decodes:
            return Decodes()

        def wait(self) -> None: ...

    monkeypatch.setattr(speeds, "named_tensors", lambda model: {"a": torch.ones(2)})
    monkeypatch.setattr(speeds, "copied_bytes", lambda bench: 1.0)
    for running in REAL.running:
        speeds._decoding(Stub(), REAL, running, dtype="bfloat16")  # type: ignore[arg-type]
    assert STEP_SECONDS * sum(steps) < PARTS["speeds"].seconds / 3
