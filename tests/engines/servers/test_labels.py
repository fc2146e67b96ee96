"""Which version a token of a server is of (I6): what our plugins inside servers note and say with each piece of an answer, and what the companion
believes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tests.engines.models import ask
from tests.engines.reading import collect, labels, live_labels, rest, until_tokens
from tests.engines.servers.fakes import FakeSglang, attached
from tests.engines.servers.troubled import spans
from tests.models.tiny import tiny_model

from midflight.engines.servers.command import INSIDE
from midflight.errors import EngineUnavailable
from midflight.types import PauseMode

SGLANG = "sglang.srt"


@dataclass(frozen=True)
class Event:
    """Stands for SGLang's own: up to which of its tokens a request is of the old weights."""

    old_version: str
    num_output_tokens: int


@dataclass(eq=False)
class Req:
    """Stands for SGLang's own."""

    output_ids: list[int]
    inflight_middle_chunks: int = 0
    weight_version_events: list[Event] = field(default_factory=list[Event])

    @property
    def num_of_the_old(self) -> int:
        return max((event.num_output_tokens for event in self.weight_version_events), default=0)


class Serving:
    weight_version = "0"


def spans_of(events: list[Event], version: str, num_tokens: int) -> list[tuple[str, int]]:
    """Stands for SGLang's own: each label, and one past the last token of it."""
    return [*((event.old_version, event.num_output_tokens) for event in events), (version, num_tokens)]


class Hooks:
    """Stands for SGLang's registry of hooks."""

    def __init__(self) -> None:
        self.by_target: dict[str, Callable[..., object]] = {}

    def register(self, target: str, hook: Callable[..., object], kind: object) -> None:
        self.by_target[target] = hook


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Hooks:
    """Of the plugin, over stand-ins of what it imports of SGLang."""
    registry = Hooks()
    grammar = SimpleNamespace(move_vocab_mask=None, apply_vocab_mask=None, reset_vocab_mask=None, allocate_vocab_mask=None)
    given: dict[str, dict[str, object]] = {
        "arg_groups.choices": {"add_grammar_backend_choices": lambda names: None},
        "constrained.base_grammar_backend": {"BaseGrammarObject": type("Base", (), {}), "register_grammar_backend": lambda *_: None},
        "constrained.llguidance_backend": {"GuidanceBackend": type("Backend", (), {}), "GuidanceGrammar": grammar},
        "plugins.hook_registry": {"HookRegistry": registry, "HookType": SimpleNamespace(AFTER=1, AROUND=2)},
        "runtime_context": {"get_serving": Serving},
        "utils.weight_versions": {"WeightVersionEvent": Event, "compute_weight_version_spans": spans_of},
    }
    register("midflight_in_sglang", {f"{SGLANG}.{name}": contents for name, contents in given.items()}, monkeypatch)
    return registry


def register(plugin: str, given: dict[str, dict[str, object]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Begins the plugin in a server that consists of these modules."""
    for name, contents in given.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(INSIDE))
    spec = importlib.util.spec_from_file_location(plugin, INSIDE / f"{plugin}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    loaded.register()


def change(hooks: Hooks, version: str, *, live: list[Req], under_way: list[Req]) -> None:
    """As SGLang's scheduler does it: it notes, of each request that has tokens, how many it has."""

    def record(scheduler: object, new_version: str) -> None:
        for req in live:
            if req.output_ids and new_version != Serving.weight_version:
                req.weight_version_events.append(Event(Serving.weight_version, len(req.output_ids)))

    scheduler = SimpleNamespace(result_queue=[(SimpleNamespace(reqs=under_way), "result")])
    hooks.by_target[f"{SGLANG}.managers.scheduler.Scheduler.record_weight_version_change"](record, scheduler, version)


def test_i6_a_step_under_way_makes_one_more_token_of_the_old_weights_for_those_that_it_is_of_and_for_nobody_else(hooks: Hooks) -> None:
    decoding, waiting, read, half_read = Req([1, 2, 3]), Req([1, 2]), Req([]), Req([], inflight_middle_chunks=1)
    change(hooks, "1", live=[decoding, waiting, read, half_read], under_way=[decoding, read, half_read])
    assert [req.num_of_the_old for req in (decoding, waiting, read, half_read)] == [4, 2, 1, 0]


def test_a_label_that_does_not_change_notes_nothing(hooks: Hooks) -> None:
    req = Req([1, 2, 3])
    change(hooks, Serving.weight_version, live=[req], under_way=[req])
    assert req.weight_version_events == []


def test_i6_sglang_says_with_each_piece_of_an_answer_which_weights_made_which_token(hooks: Hooks) -> None:
    begun, changed = Req([1]), Req([1, 2, 3], weight_version_events=[Event("9", 2)])
    pieces, payload = SimpleNamespace(output_reqs=[begun, changed]), SimpleNamespace(completion_tokens=[1, 3], weight_versions=None)
    say = hooks.by_target[f"{SGLANG}.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.to_payload"]
    assert say(payload, pieces, dp_rank=0, is_idle_batch=False) is payload
    assert payload.weight_versions == [[("0", 1)], [("9", 2), ("0", 3)]]
    assert say(None, pieces, dp_rank=0, is_idle_batch=False) is None, "nothing is sent"


class RequestState:
    """Stands for vLLM's own, which says versions with the last piece only."""

    def _new_completion_output(self, token_ids: list[int], finish_reason: str | None) -> SimpleNamespace:
        return SimpleNamespace(token_ids=token_ids, weight_versions=["all"] if finish_reason else None)

    def _weight_version_spans(self) -> list[str]:
        return ["so far"]


def test_i6_vllm_says_with_each_piece_of_an_answer_which_weights_made_which_token(monkeypatch: pytest.MonkeyPatch) -> None:
    structured = "vllm.v1.structured_output"
    given: dict[str, dict[str, object]] = {
        "vllm.v1.engine.output_processor": {"RequestState": RequestState},
        structured: {"StructuredOutputManager": type("Manager", (), {"_create_grammar": lambda self, request: None})},
        f"{structured}.backend_types": {"StructuredOutputGrammar": type("Grammar", (), {})},
    }
    monkeypatch.setattr(RequestState, "_new_completion_output", RequestState._new_completion_output)  # and back again
    register("midflight_in_vllm", given, monkeypatch)
    state = RequestState()
    pieces = [state._new_completion_output([7], None), state._new_completion_output([8], finish_reason="length")]
    assert [(piece.token_ids, piece.weight_versions) for piece in pieces] == [([7], ["so far"]), ([8], ["all"])]


class Overtaken(FakeSglang):
    """Its plugin labels each token when it is made. What it says stays on its way for a while, its answers to orders do not."""

    num_on_the_way = 6

    def __init__(self) -> None:
        super().__init__()
        self.has_plugin = True

    async def _say(self, body: dict[str, object]) -> AsyncIterator[bytes]:
        made: list[str] = []
        on_the_way: list[bytes] = []
        num = self.wanted(body)
        for i in range(1, num + 1):
            await self._step()
            made.append(self.label)
            said = self.event(i, last=i == num)
            said["meta_info"]["weight_versions"] = spans(made)
            on_the_way.append(b"data: " + json.dumps(said).encode() + b"\n\n")
            if len(on_the_way) > self.num_on_the_way:
                yield on_the_way.pop(0)
        for late in on_the_way:
            yield late


def test_i6_tokens_that_an_answer_to_an_order_overtakes_keep_the_version_that_made_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with attached(Overtaken(), tmp_path) as (engine, receiver):
            await engine.stage(receiver.publish(1, tiny_model(seed=1)))
            chunks = engine.generate(ask(max_tokens=30))
            got = await until_tokens(chunks, 3)
            await engine.commit(1)
            got += await rest(chunks)
        assert {version for version, _ in labels(got)} == {0, 1}
        assert live_labels(got) == labels(got)

    asyncio.run(main())


def test_i6_a_server_that_was_started_again_unnoticed_serves_no_token_of_weights_without_a_version(tmp_path: Path) -> None:
    async def main() -> None:
        fake = Overtaken()
        async with attached(fake, tmp_path) as (engine, _):
            fake.label = "default"
            with pytest.raises(EngineUnavailable, match="calls 'default', which is no version"):
                await collect(engine, ask(max_tokens=5))

    asyncio.run(main())


class SaysVersions(FakeSglang):
    """Its overlap scheduler has a step under way. It gives the first tokens of each answer to its first weights."""

    num_of_the_first = 0

    def __init__(self) -> None:
        super().__init__()
        self.overlaps = True

    def event(self, i: int, *, last: bool) -> object:
        said = super().event(i, last=last)
        assert isinstance(said, dict)
        if last:
            spans = [("0", 0, self.num_of_the_first), ("1", self.num_of_the_first, i)]
            said["meta_info"]["weight_versions"] = [{"version": v, "start": start, "end": end} for v, start, end in spans]
        return said


@pytest.mark.parametrize(("has_plugin", "num_late"), [(True, 0), (False, 1)])
def test_i6_a_server_with_our_plugin_is_believed_and_the_account_of_any_other_is_put_back_by_the_step_under_way(
    has_plugin: bool, num_late: int, tmp_path: Path
) -> None:
    async def main() -> None:
        fake = SaysVersions()
        fake.has_plugin, fake.num_of_the_first = has_plugin, 6
        async with attached(fake, tmp_path) as (engine, receiver):
            await engine.stage(receiver.publish(1, tiny_model(seed=1)))
            chunks = engine.generate(ask(max_tokens=20))
            got = await until_tokens(chunks, 3)
            await engine.pause(PauseMode.KEEP)
            await engine.commit(1)
            await engine.resume()
            got += await rest(chunks)
        num_old = 6 + num_late
        assert labels(got) == [(0, 0)] * num_old + [(1, 0)] * (20 - num_old)
        assert live_labels(got)[:19] == [(0, 0)] * 19, "the server says it at the end, and they may be of the old ones"

    asyncio.run(main())
