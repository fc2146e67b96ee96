"""What servers say when they are not in their senses, or when something stands between them and us: it costs one attempt at most."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.responses import Response
from tests.engines.models import ask
from tests.engines.reading import collect, ids
from tests.engines.servers.fakes import Fake, FakeSglang, FakeVllm, attached
from tests.engines.servers.test_misbehaving import failure_to_attach
from tests.models.tiny import tiny_model

from midflight.engines.servers.vllm import VllmReader
from midflight.errors import EngineError, EngineUnavailable, Overloaded, RequestRejected

KINDS: list[type[Fake]] = [FakeSglang, FakeVllm]
of_both = pytest.mark.parametrize("kind", KINDS)


def vllm(**choice: object) -> bytes:
    content = [{"token_id": 97, "logprob": -1.0}]
    return json.dumps({"choices": [{"token_ids": [97], "logprobs": {"content": content}, "finish_reason": None, **choice}]}).encode()


def sglang(**meta: object) -> bytes:
    said = {"completion_tokens": 1, "output_token_logprobs": [[-0.5, 97, None]], "finish_reason": None, **meta}
    return json.dumps({"output_ids": [97], "meta_info": said}).encode()


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        (FakeVllm, vllm(logprobs=None)),
        (FakeVllm, vllm(logprobs={"content": []})),
        (FakeVllm, vllm(logprobs={"content": [{"token_id": 97, "logprob": -1.0}] * 2})),
        (FakeVllm, vllm(token_ids=None)),
        (FakeVllm, vllm(token_ids=["a"])),
        (FakeVllm, vllm(logprobs={"content": [{"token_id": 97, "logprob": None}]})),
        (FakeVllm, b'{"choices": [{"token_ids": [97], "logprobs": {"content": [{"token_id": 97, "logprob": NaN}]}}]}'),
        (FakeVllm, b"\xff\xfe"),
        (FakeVllm, b"[]"),
        (FakeVllm, b"null"),
        (FakeVllm, vllm(finish_reason="magic")),
        (FakeSglang, sglang(output_token_logprobs=[])),
        (FakeSglang, sglang(completion_tokens=3)),
        (FakeSglang, sglang(output_token_logprobs=[[float("nan"), 97, None]])),
        (FakeSglang, sglang(finish_reason={"type": "magic"})),
        (FakeSglang, b"\xff\xfe"),
        (FakeSglang, b"null"),
    ],
)
def test_nonsense_costs_the_request_and_not_the_engine(kind: type[Fake], event: bytes, tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, _):
            fake.says_instead = event
            with pytest.raises(EngineUnavailable):
                await collect(engine, ask(max_tokens=5))
            fake.says_instead = None
            assert len(ids(await collect(engine, ask(max_tokens=5)))) == 5
            assert engine.reading().num_running == 0

    asyncio.run(main())


@of_both
@pytest.mark.parametrize(
    ("status", "headers", "error"),
    [
        (429, {"retry-after": "7"}, Overloaded),
        (503, {}, Overloaded),
        (503, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, Overloaded),
        (400, {}, RequestRejected),
        (404, {}, EngineUnavailable),
        (401, {}, EngineUnavailable),
        (405, {}, EngineUnavailable),
        (302, {"location": "/health"}, EngineUnavailable),
        (307, {"location": "/nowhere"}, EngineUnavailable),
        (500, {}, EngineUnavailable),
    ],
)
def test_a_refusal_is_of_the_request_only_where_the_server_has_judged_it(
    kind: type[Fake], status: int, headers: dict[str, str], error: type[Exception], tmp_path: Path
) -> None:
    """Another program on the server's port, or a proxy before it, knows nothing of the request: it goes elsewhere."""

    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, _):
            fake.instead[kind.generate] = Response("no", status, headers)
            with pytest.raises(error) as caught:
                await collect(engine, ask(max_tokens=5))
            assert type(caught.value) is error
            if status == 429:
                assert caught.value.retry_after_seconds == 7  # type: ignore[attr-defined]

    asyncio.run(main())


@of_both
def test_a_call_that_is_sent_elsewhere_has_not_been_done(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, receiver):
            fake.instead["/update_weight_version" if kind is FakeVllm else kind.load] = Response("", 302, {"location": "/health"})
            await engine.stage(receiver.publish(1, tiny_model(seed=1)))
            with pytest.raises(EngineError, match="302"):
                await engine.commit(1)

    asyncio.run(main())


@of_both
def test_events_split_anywhere_are_read_alike(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()

        async def crumbs(body: dict[str, object]) -> AsyncIterator[bytes]:
            events = [json.dumps(fake.event(i, last=i == 5)).encode() for i in range(1, 6)]
            for byte in b": hello\r\n\r\nevent: x\r\n" + b"".join(b"data:" + e + b"\r\n\r\n" for e in events) + b"data: [DONE]":
                yield bytes([byte])

        async with attached(fake, tmp_path) as (engine, _):
            fake._say = crumbs  # type: ignore[method-assign]
            assert ids(await collect(engine, ask(max_tokens=5))) == (97,) * 5

    asyncio.run(main())


@of_both
def test_more_tokens_and_events_after_the_end_are_no_part_of_the_answer(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()

        async def chatty(body: dict[str, object]) -> AsyncIterator[bytes]:
            for i in range(1, 9):
                yield b"data: " + json.dumps(fake.event(i, last=i >= 5)).encode() + b"\n\n"
            yield b"data: garbage\n\n"

        async with attached(fake, tmp_path) as (engine, _):
            fake._say = chatty  # type: ignore[method-assign]
            assert ids(await collect(engine, ask(max_tokens=5))) == (97,) * 5
            assert engine.reading().num_running == 0

    asyncio.run(main())


@of_both
def test_an_answer_that_is_squeezed_is_read(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, _):
            said = b"".join(b"data: " + json.dumps(fake.event(i, last=i == 5)).encode() + b"\n\n" for i in range(1, 6))
            fake.instead[kind.generate] = Response(gzip.compress(said), 200, {"content-encoding": "gzip"})
            assert ids(await collect(engine, ask(max_tokens=5))) == (97,) * 5
            fake.instead[kind.generate] = Response(b"not gzip at all", 200, {"content-encoding": "gzip"})
            with pytest.raises(EngineUnavailable):
                await collect(engine, ask(max_tokens=5))

    asyncio.run(main())


@of_both
def test_what_a_server_says_of_itself_may_be_nonsense(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        for path, said in [
            ("/v1/models", {"data": [{"max_model_len": None, "root": "x"}]}),
            ("/server_info", {"version": "99.0", "max_req_input_len": None, "max_running_requests": 8, "disable_overlap_schedule": True}),
            ("/server_info", {"version": "99.0", "max_req_input_len": 9, "max_running_requests": "many", "disable_overlap_schedule": True}),
        ]:
            fake = kind()
            if (path == "/v1/models") == (kind is FakeVllm):
                fake.instead[path] = Response(json.dumps(said))
                assert "expected a whole number" in await failure_to_attach(fake, tmp_path)

    asyncio.run(main())


VLLM_METRICS = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",num_gpu_blocks_override="None",engine="0"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="50",num_gpu_blocks_override="None",engine="1"} 1.0
vllm:num_requests_running{engine="0"} 0.0
"""
VLLM_INFO = {"vllm_config": {"scheduler_config": {"max_num_seqs": 256}}}


@of_both
def test_a_server_that_others_started_is_asked_how_many_requests_and_keys_it_holds(kind: type[Fake], tmp_path: Path) -> None:
    told: dict[str, object] = {"/metrics": VLLM_METRICS, "/server_info": VLLM_INFO}
    if kind is FakeSglang:
        told = {"max_running_requests": 256, "max_total_num_tokens": 2400}

    async def main() -> None:
        held = list[tuple[int, int | None]]()
        for theirs, tells in ((False, told), (True, told), (True, {}), (True, {"/metrics": "nonsense", "max_total_num_tokens": None})):
            fake = kind()
            fake.is_theirs, fake.tells = theirs, tells
            async with attached(fake, tmp_path) as (engine, _):
                held.append((engine.capabilities.max_running, engine.capabilities.max_keys))
        assert held == [(8, 2400), (256, 2400), (8, None), (8, None)], "16 * (100 + 50) tokens"

    asyncio.run(main())


@of_both
def test_a_server_that_is_laid_over_another_number_of_processes_is_refused(kind: type[Fake], tmp_path: Path) -> None:
    told: dict[str, object] = {"/metrics": VLLM_METRICS, "/collective_rpc": {"results": ["True"] * 2}}  # two replicas of two
    if kind is FakeSglang:
        told = {"tp_size": 2, "pp_size": 1, "dp_size": 2}

    async def main() -> None:
        for expected in (None, 4):
            fake = kind()
            fake.tells = told
            async with attached(fake, tmp_path, num_workers=expected):
                pass
        fake = kind()
        fake.tells = told
        said = await failure_to_attach(fake, tmp_path, num_workers=8)
        assert "4 processes compute for this server, and engine.servers says 8 (tensor x pipeline x data parallel)" in said
        fake = kind()
        fake.tells = {"tp_size": None, "/collective_rpc": {}}
        async with attached(fake, tmp_path, num_workers=8):
            pass  # one that does not say is believed

    asyncio.run(main())


@of_both
def test_a_server_of_another_model_is_refused_where_its_folder_says_so(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        (tmp_path / "other").mkdir()
        fake.model = str(tmp_path / "other")
        async with attached(fake, tmp_path):
            pass  # an empty folder says nothing
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "vocab_size": 199}))
        fake = kind()
        fake.model = str(tmp_path / "other")
        said = await failure_to_attach(fake, tmp_path)
        assert f"it serves '{fake.model}', whose vocab_size is 199, and '{tmp_path / 'model'}' has 262; start the server" in said

    asyncio.run(main())


@of_both
def test_a_server_of_another_kind_is_refused_by_its_address(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        fake.own = "/something/else"
        assert re.search(
            r"attaching to http://127\.0\.0\.1:\d+: no (vLLM|SGLang) listens there; check the URL and --engine",
            await failure_to_attach(fake, tmp_path),
        )

    asyncio.run(main())


def test_a_log_probability_that_vllm_has_not_got_is_none() -> None:
    reader = VllmReader(ask(top_logprobs=1))
    content = [{"token_id": 97, "logprob": -9999.0, "top_logprobs": [{"token_id": 98, "logprob": -9999.0}]}]
    piece = reader.read(vllm(logprobs={"content": content}))
    assert piece.logprobs == (float("-inf"),) and piece.top_logprobs == (((98, -9999.0),),)
