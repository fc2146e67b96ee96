"""Scores of given tokens: the numbers of a plain forward, whatever the rows, and what befalls who asks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from tests.engines.models import ask, make_engine
from tests.engines.test_contract import attached, listening, running
from tests.engines.test_runner import other_architectures
from tests.models.tiny import MAX_CONTEXT, tiny_model
from tests.real.processes import free_port
from transformers import PreTrainedModel

from midflight.engines.app import build_app
from midflight.engines.embedded.scoring import likely_tokens, portions, token_logprobs
from midflight.engines.relay import relay, relay_steps
from midflight.engines.wire import decode_rows, decode_scores, encode_rows, encode_scores
from midflight.errors import ContextExceeded, EngineError, EngineUnavailable, NotSupported, RequestRejected
from midflight.ports import Scorer
from midflight.types import Float32, Int32, PauseMode

LENGTHS = (5, 1, 17, 2, 40, 9, 9, 33)


def ragged(lengths: Sequence[int] = LENGTHS) -> tuple[Int32, Int32]:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return np.random.default_rng(0).integers(0, 256, offsets[-1]).astype(np.int32), offsets


def reference(model: PreTrainedModel, token_ids: Int32, row_offsets: Int32, *, temperature: float) -> Float32:
    """One plain forward of `transformers` for each row."""
    found: list[np.ndarray] = []
    for row in np.split(token_ids, row_offsets[1:-1]):
        ids = torch.from_numpy(row.astype(np.int64))[None]
        with torch.no_grad():
            logprobs = (model(input_ids=ids).logits[0].double() / temperature).log_softmax(-1)
        found.append(np.array([0.0, *logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()]))
    return np.concatenate(found).astype(np.float32)


def test_rows_go_together_while_their_padding_fits_and_a_longer_one_goes_alone() -> None:
    assert portions(np.array([3, 9, 3, 2, 4]), max_tokens=8) == [[3, 0], [2, 4], [1]]


@pytest.mark.parametrize("max_batch_tokens", [8, 64, 4096])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_scores_of_ragged_rows_are_those_of_plain_forwards(temperature: float, max_batch_tokens: int) -> None:
    async def main() -> Float32:
        async with running(make_engine(max_batch_tokens=max_batch_tokens)) as engine:
            return await engine.score(*ragged(), temperature=temperature)

    scores = asyncio.run(main())
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, reference(tiny_model(), *ragged(), temperature=temperature), atol=1e-5)


@pytest.mark.parametrize("max_logits", [1, 262 * 7 * 3, 2**26])
@pytest.mark.parametrize("name", ["llama", "sliding window", "gpt-neox", "mixture"])
def test_a_row_goes_through_in_stretches_where_its_logits_would_be_too_many(name: str, max_logits: int) -> None:
    model, plain = other_architectures()[name].eval(), other_architectures()[name].eval()
    make_engine(model)  # it attends as the engine does, from now on
    token_ids, offsets = ragged((4, 21, 13))
    rows = token_logprobs(model, np.split(token_ids, offsets[1:-1]), temperature=1.0, max_logits=max_logits)
    np.testing.assert_allclose(np.concatenate(rows), reference(plain, token_ids, offsets, temperature=1.0), atol=1e-5)


@pytest.mark.parametrize("max_logits", [1, 2**26])
def test_tokens_of_a_prompt_come_with_the_likeliest_at_their_places(max_logits: int) -> None:
    model, row = tiny_model(), ragged()[0][:21].tolist()
    make_engine(model)
    with torch.no_grad():
        plain = tiny_model()(input_ids=torch.tensor([row])).logits[0].double().log_softmax(-1)
    found = likely_tokens(model, row, top=3, max_logits=max_logits)
    assert [at[0][0] for at in found] == row[1:] and {len(at) for at in found} == {4}
    for at, scores in zip(found, plain[:-1], strict=True):
        assert at[0][1] == pytest.approx(float(scores[at[0][0]]), abs=1e-5)
        best = scores.topk(3)
        assert [i for i, _ in at[1:]] == best.indices.tolist() and [p for _, p in at[1:]] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_scoring_changes_nothing_that_is_generated_and_goes_on_in_a_pause() -> None:
    expected = make_engine().generate_all([ask(seed=5, max_tokens=30)])[0].token_ids

    async def main() -> None:
        async with running(make_engine(max_batch_tokens=8)) as engine, asyncio.TaskGroup() as tasks:

            async def generate() -> tuple[int, ...]:
                return tuple([token async for chunk in engine.generate(ask(seed=5, max_tokens=30)) for token in chunk.token_ids])

            scoring, said = tasks.create_task(engine.score(*ragged(), temperature=1.0)), tasks.create_task(generate())
            while_generating = await scoring
            assert await said == expected
            await engine.pause(PauseMode.KEEP)
            assert (await engine.score(*ragged(), temperature=1.0)).tolist() == while_generating.tolist()

    asyncio.run(main())


def test_the_bytes_of_rows_and_scores_are_read_as_they_were_written() -> None:
    token_ids, offsets = ragged()
    ids, read, temperature = decode_rows(encode_rows(token_ids, offsets, temperature=0.7))
    assert (ids.tolist(), read.tolist(), temperature) == (token_ids.tolist(), offsets.tolist(), 0.7)
    scores = np.array([0, -1.5, -np.inf], np.float32)
    assert decode_scores(encode_scores(scores), num_tokens=3).tolist() == scores.tolist()
    with pytest.raises(EngineUnavailable, match="12 bytes for 4 tokens"):
        decode_scores(encode_scores(scores), num_tokens=4)
    for damaged in (b"", b"\x80", encode_rows(token_ids, offsets, temperature=1.0)[:-9]):
        with pytest.raises(RequestRejected, match="reading rows"):
            decode_rows(damaged)


def test_the_wire_gives_the_scores_of_the_engine_and_names_what_it_refuses() -> None:
    def refused(lengths: Sequence[int], error: type[Exception], named: str, *, temperature: float = 1.0, token: int = 0):
        token_ids, offsets = ragged(lengths)
        token_ids[:1] = token
        return (token_ids, offsets, temperature, error, named)

    async def main() -> None:
        engine = make_engine()
        app = build_app(engine, relay_steps, token="secret", scorer=engine)
        async with running(engine), listening(app) as url, attached(url) as remote:
            teacher: Scorer = remote
            expected = await engine.score(*ragged(), temperature=0.7)
            assert (await teacher.score(*ragged(), temperature=0.7)).tolist() == expected.tolist()
            for token_ids, offsets, temperature, error, named in (
                refused((), RequestRejected, "empty"),
                refused((3, 0, 2), RequestRejected, "empty"),
                refused((3,), RequestRejected, "temperature is 0", temperature=0.0),
                refused((3,), RequestRejected, "token id 262", token=262),
                refused((MAX_CONTEXT + 1,), ContextExceeded, f"a row has {MAX_CONTEXT + 1} tokens"),
            ):
                with pytest.raises(error, match=named):
                    await remote.score(token_ids, offsets, temperature=temperature)

    asyncio.run(main())


def test_an_engine_that_only_generates_says_so() -> None:
    async def main() -> None:
        engine = make_engine()
        async with running(engine), listening(build_app(engine, relay, token="secret")) as url, attached(url) as remote:
            with pytest.raises(NotSupported, match="only generates"):
                await remote.score(*ragged(), temperature=1.0)

    asyncio.run(main())


def test_a_model_that_fails_over_the_rows_is_an_error_that_says_so_and_the_engine_goes_on() -> None:
    async def main() -> None:
        model = tiny_model()
        async with running(make_engine(model)) as engine:
            forward = model.forward
            model.forward = lambda **given: (_ for _ in ()).throw(RuntimeError("out of memory"))  # type: ignore[method-assign, assignment]
            with pytest.raises(EngineError, match=r"scoring 116 tokens.*out of memory"):
                await engine.score(*ragged(), temperature=1.0)
            model.forward = forward  # type: ignore[method-assign]
            assert len(await engine.score(*ragged(), temperature=1.0)) == 116

    asyncio.run(main())


def test_an_engine_that_is_lost_while_it_scores_is_an_error_at_once_and_its_next_life_is_waited_for() -> None:
    """The first to listen there never answers, and goes."""

    async def main() -> None:
        engine, asked, port = make_engine(), asyncio.Event(), free_port()

        async def never(request: Request) -> Response:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        async def until_asked() -> None:
            routes = [
                Route("/engine/v1/score", never, methods=["POST"]),
                WebSocketRoute("/engine/v1/stream", partial(relay_steps, engine)),
            ]
            async with listening(Starlette(routes=routes), port=port):
                await asked.wait()

        async with running(engine), asyncio.TaskGroup() as tasks:
            dying = tasks.create_task(until_asked())
            async with attached(f"http://127.0.0.1:{port}") as remote:
                with pytest.raises(EngineUnavailable, match="did not answer /engine/v1/score"):
                    await remote.score(*ragged(), temperature=1.0)
                await dying
                waiting = tasks.create_task(remote.score(*ragged(), temperature=1.0))
                async with listening(build_app(engine, relay_steps, token="secret", scorer=engine), port=port):
                    assert len(await waiting) == sum(LENGTHS)

    asyncio.run(main())
