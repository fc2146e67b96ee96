"""vLLM's wire: tokens in and out by `/inference/v1/generate`, pauses by `/pause`, weights by our
own loader in its workers.

It was tried with 0.32.0. It is started with `VLLM_SERVER_DEV_MODE=1`, `--enable-scale-out`,
`--logprobs-mode processed_logprobs` and `--worker-extension-cls midflight_vllm.Loader`.
docs/engines.md says what each is for.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import msgspec

from midflight import types
from midflight.engines.servers.command import INSIDE
from midflight.engines.servers.releases import Releases
from midflight.engines.servers.server import (
    EventTokens,
    ServerClient,
    ServerDescription,
    ServerRequest,
    number,
    part,
    recorded_experts,
)
from midflight.errors import EngineError, EngineUnavailable, RequestRejected
from midflight.types.generation import Api, copied

_GENERATE = "/inference/v1/generate"
RELEASES = Releases("vLLM", oldest="0.32.0", tried="0.32.0")
_NEEDED = {
    _GENERATE: "start it with --enable-scale-out (vLLM 0.32 or newer)",
    "/pause": "start it with VLLM_SERVER_DEV_MODE=1 (vLLM 0.32 or newer)",
    "/collective_rpc": "start it with VLLM_SERVER_DEV_MODE=1",
    "/update_weight_version": "use vLLM 0.32 or newer",
}
"""Routes that we cannot do without, and how to get them."""
_LOAD = "/v1/load_lora_adapter"
_UNLOAD = "/v1/unload_lora_adapter"
_ADAPTED = (
    "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or set lora.merged = true"
)
_REASONS = {
    "stop": types.FinishReason.STOP,
    "length": types.FinishReason.LENGTH,
    "abort": types.FinishReason.ABORT,
}
_NO_NUMBER = -9999.0
"""This number stands for minus infinity, for NaN, and for a log-probability that vLLM does not
have.
"""
_CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(block_size|num_gpu_blocks)="(\d+)"')
_OF_THE_FORM = "Internal server error"
"""The message of the error by which vLLM ends a request whose grammar does not compile there. An
engine that died causes another error.
"""
_LOADER = "midflight_load"
_LOADER_READY = "midflight_ready"
_FEATURES = frozenset(
    {types.Feature.PENALTIES, types.Feature.LOGIT_BIAS, types.Feature.TOP_LOGPROBS}
)


_TAGS = {types.MemoryPart.WEIGHTS: "weights", types.MemoryPart.KEYS: "kv_cache"}


class _Logprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class _Content(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    top_logprobs: tuple[_Logprob, ...] = ()


class _Logprobs(msgspec.Struct, frozen=True):
    content: tuple[_Content, ...] | None = None


class _VllmSpan(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class _VllmChoice(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: tuple[_VllmSpan, ...] | None = None
    routed_experts: str | None = None
    """[T, layers, chosen] as base64 of numpy's own format, on the last piece"""


class _VllmEvent(msgspec.Struct, frozen=True):
    choices: tuple[_VllmChoice, ...] = ()
    error: object = None


_part = partial(part, of="vLLM 0.32 or newer")
_number_of = partial(number, of="vLLM 0.32 or newer")
_decode = msgspec.json.Decoder(_VllmEvent).decode


class VllmReader:
    """Reads vLLM's events. Each event has the tokens since the one before. The last one also says
    which weights made which token, and with our plugin in vLLM each one does.
    """

    def __init__(self, request: types.GenerateRequest, *, num_experts: int = 0) -> None:
        """`num_experts` is the number of experts of a layer, if the server records the choices of a
        mixture.
        """
        self._num_tops = request.sampling.top_logprobs
        self._num_experts = num_experts
        self._begins_form = request.sampling.grammar is not None

    def read(self, event: bytes) -> EventTokens:
        try:
            said = _decode(event)
        except msgspec.DecodeError as error:
            raise EngineUnavailable(
                f"reading vLLM's answer {event[:200]!r}: {error}. Use vLLM 0.32 or newer."
            ) from error
        if said.error is not None and self._begins_form and _OF_THE_FORM in str(said.error):
            raise RequestRejected(
                f"vLLM took no answer of this form: {event[:300]!r}. Send a simpler grammar.",
                param="grammar",
            )
        if said.error is not None or not said.choices:
            raise EngineUnavailable(f"vLLM ended an answer with {event[:300]!r}. Look at its log.")
        choice = said.choices[0]
        self._begins_form = False
        content: tuple[_Content, ...] = ()
        if choice.logprobs is not None and choice.logprobs.content is not None:
            content = choice.logprobs.content
        tops: tuple[tuple[tuple[int, float], ...], ...] = ()
        if self._num_tops:
            tops = tuple([self._likeliest(each) for each in content])
        spans: tuple[_VllmSpan, ...] = ()
        if choice.weight_versions is not None:
            spans = choice.weight_versions
        return EventTokens(
            token_ids=choice.token_ids or (),
            logprobs=tuple([_number(each.logprob) for each in content]),
            top_logprobs=tops,
            finish=None if choice.finish_reason is None else _finish(choice),
            spans=tuple((s.version, s.start, s.end) for s in spans),
            experts=self._experts(choice.routed_experts),
        )

    def _experts(self, encoded: str | None) -> types.UInt8 | None:
        if encoded is None or not self._num_experts:
            return None
        return recorded_experts(encoded, num_choices=None, num_experts=self._num_experts)

    def _likeliest(self, content: _Content) -> tuple[tuple[int, float], ...]:
        """The likeliest ids, as many as the request asks for. vLLM is asked for one more, and puts
        the sampled token before the others.
        """
        logprobs = {top.token_id: top.logprob for top in content.top_logprobs}
        ranked = sorted(logprobs.items(), key=lambda pair: -pair[1])
        return tuple(ranked[: self._num_tops])


def _number(logprob: float) -> float:
    """A log-probability. If vLLM has no number, it is minus infinity, which is impossible for a
    sampled token.
    """
    return logprob if logprob > _NO_NUMBER else float("-inf")


def _finish(choice: _VllmChoice) -> types.Finish:
    reason = _REASONS.get(choice.finish_reason or "")
    if reason is None:
        raise EngineUnavailable(
            f"vLLM ended an answer with finish_reason {choice.finish_reason!r}. Look at its log."
        )
    return types.Finish(reason, choice.stop_reason if reason is types.FinishReason.STOP else None)


class VllmServer:
    """Implements `Server`."""

    late_labels = 0

    def __init__(
        self,
        *,
        vocab_size: int,
        max_running: int,
        theirs: bool = False,
        num_experts: int = 0,
        num_adapters: int = 0,
    ) -> None:
        """With `theirs` other people started the server, so it is asked how many requests it runs;
        `max_running` counts only if it does not say. `num_experts` is the number of experts of a
        mixture's layer, if the server has to report which it chose. `num_adapters` is the number of
        versions that the server has to keep, if versions are adapters.
        """
        self._vocab_size = vocab_size
        self._max_running = max_running
        self._theirs = theirs
        self._num_experts = num_experts
        self.num_adapters = num_adapters
        self._seeds = False
        """True if noise is a function of seed and position, so that it survives a resume."""

    async def attach(self, client: ServerClient) -> ServerDescription:
        paths = await client.paths()
        if "/version" not in paths:
            raise EngineError(
                f"attaching to {client.url}: no vLLM listens there; check the URL and --engine "
                "(engine.urls, engine.kind)."
            )
        version = str(_part(await client.get("/version"), "version"))
        caution = RELEASES.caution(version, url=client.url)
        needed = dict(_NEEDED)
        if self.num_adapters:
            needed[_LOAD] = _ADAPTED
        for path, remedy in needed.items():
            if path not in paths:
                raise EngineError(
                    f"attaching to {client.url}: vLLM {version} has no {path}; {remedy}."
                )
        model = _part(await client.get("/v1/models"), "data", 0)
        if _part(await client.get("/is_paused"), "is_paused") is True:
            await self.resume(client)
        num_workers = await _check_loader(client)
        self._seeds = await _says_yes(client, "midflight_seeds")
        logprob_kind = await _logprob_kind(client)
        max_running = await self._running(client, paths)
        max_keys = await _keys(client)
        features = set(_FEATURES)
        if await _says_yes(client, "midflight_grammars"):
            features.add(types.Feature.GRAMMARS)
        return ServerDescription(
            num_workers=num_workers,
            caution=caution,
            capabilities=types.Capabilities(
                pause_modes=frozenset(types.PauseMode),
                logprob_kind=logprob_kind,
                honours_seed=self._seeds,
                versions_per_token=True,
                stops_on_strings=True,
                aborts_single_requests=True,
                stages_weights=True,
                side_by_side=self.num_adapters > 0,
                max_context=_number_of(model, "max_model_len"),
                vocab_size=self._vocab_size,
                max_running=max_running,
                max_keys=max_keys,
                features=frozenset(features),
            ),
            label=await self.label(client),
            model=str(_part(model, "root")),
        )

    async def _running(self, client: ServerClient, paths: frozenset[str]) -> int:
        """The server's `--max-num-seqs`. A server that was started here has ours, and is not asked,
        because it inspects the whole machine to answer, which takes seconds.
        """
        if self._theirs and "/server_info" in paths:
            with suppress(EngineError):
                info = await client.get("/server_info?config_format=json")
                return _number_of(info, "vllm_config", "scheduler_config", "max_num_seqs")
        return self._max_running

    async def label(self, client: ServerClient) -> str:
        return str(_part(await client.get("/weight_info"), "weight_version"))

    async def relabel(self, client: ServerClient, version: types.Version) -> None:
        await client.post("/update_weight_version", {"new_version": str(version)})

    def body(self, asked: ServerRequest, *, salt: str) -> tuple[str, dict[str, object]]:
        """See `Server`. The body has a seed only if our loader handles it. Without the loader a
        seed kills vLLM on a CPU at a prompt in pieces, and the noise would begin anew at a resume.
        """
        request = asked.request
        sampling = _sampling(request, asked.ends)
        if request.seeded and self._seeds:
            sampling["seed"] = request.sampling.seed % 2**63  # it takes 64 bits with a sign
        if asked.shape:
            sampling |= _shaped(asked.shape)
        body: dict[str, object] = {
            "request_id": asked.id,
            "token_ids": request.input_ids,
            "stream": True,
            "cache_salt": salt,
            "sampling_params": sampling,
        }
        if asked.adapter:
            body["model"] = asked.adapter
        return _GENERATE, body

    def reader(self, request: types.GenerateRequest) -> VllmReader:
        return VllmReader(request, num_experts=self._num_experts)

    async def abort(self, client: ServerClient, request_id: str) -> None:
        await client.post("/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]})

    async def pause(self, client: ServerClient, mode: types.PauseMode) -> None:
        theirs = "abort" if mode is types.PauseMode.ABORT else "keep"
        clear = "true" if mode is types.PauseMode.RECOMPUTE else "false"
        await client.post(f"/pause?mode={theirs}&clear_cache={clear}")

    async def settle(self, client: ServerClient) -> None:
        await client.settle("/is_paused")

    async def resume(self, client: ServerClient) -> None:
        await client.post("/resume")

    async def sleep(self, client: ServerClient) -> None:
        """See `Server`. At level 1 vLLM keeps its weights in host memory, at level 2 nowhere."""
        await client.post("/sleep?level=1&mode=abort")

    async def wake(self, client: ServerClient, part: types.MemoryPart) -> None:
        await client.post(f"/wake_up?tags={_TAGS[part]}")

    async def load(
        self, client: ServerClient, folder: Path, version: types.Version, *, recompute: bool
    ) -> None:
        """See `Server`. The pause has cleared caches, where they had to be."""
        await client.post("/collective_rpc", {"method": _LOADER, "args": [str(folder)]})
        await self.relabel(client, version)

    async def load_adapter(self, client: ServerClient, name: str, folder: str) -> None:
        await client.post(_LOAD, {"lora_name": name, "lora_path": folder})

    async def unload_adapter(self, client: ServerClient, name: str) -> None:
        """The name is free at once. The memory is free when another adapter takes it; vLLM reuses
        the memory of the adapter that was unused for longest.
        """
        await client.post(_UNLOAD, {"lora_name": name})


async def _logprob_kind(client: ServerClient) -> types.LogprobKind:
    """The kind of the server's log-probabilities, by a token that has no alternative: its
    log-probability is 0 after truncation, and less before. The request also warms the server up.
    """
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0}
    answer = await client.post(_GENERATE, {"token_ids": [0], "sampling_params": sampling})
    logprob = _part(answer, "choices", 0, "logprobs", "content", 0, "logprob")
    return types.LogprobKind.SAMPLED if logprob == 0 else types.LogprobKind.RAW


async def _keys(client: ServerClient) -> int | None:
    """The number of tokens that the server's blocks hold, in all replicas. `None` if its metrics do
    not say. No description of its routes names these metrics.
    """
    num_keys = 0
    for cache in await _caches(client):
        num_keys += int(cache.get("block_size", 0)) * int(cache.get("num_gpu_blocks", 0))
    return num_keys or None


async def _caches(client: ServerClient) -> Sequence[Mapping[str, str]]:
    """The server's metrics about the cache of each replica. Empty if there are none."""
    try:
        said = str(await client.get("/metrics"))
    except EngineError:
        return ()
    return [dict(_LABEL.findall(labels)) for labels in _CACHE.findall(said)]


async def _check_loader(client: ServerClient) -> int | None:
    """Raises `EngineError` if the server runs without our loader. This is asked before anything is
    generated, because a run would get as far as its first new version. Returns how many workers
    have the loader in all replicas, of which the first answers.
    """
    try:
        answer = await client.post("/collective_rpc", {"method": _LOADER_READY})
    except EngineUnavailable:
        raise
    except EngineError as error:
        raise EngineError(
            f"attaching to {client.url}: vLLM has not loaded what makes new weights live; start it "
            f"with --worker-extension-cls midflight_vllm.Loader and PYTHONPATH={INSIDE}. {error}"
        ) from error
    workers = _results(answer)
    if not workers:
        return None
    num_replicas = max(1, len(await _caches(client)))
    return len(workers) * num_replicas


def _results(answer: object) -> list[object]:
    """The results of a call of every worker, one of each."""
    if not isinstance(answer, dict):
        return []
    results = cast(dict[str, object], answer).get("results")
    return cast(list[object], results) if isinstance(results, list) else []


async def _says_yes(client: ServerClient, method: str) -> bool:
    """True if our loader answers true in every worker. vLLM sends anything that is no list or
    object as text.
    """
    try:
        answer = await client.post("/collective_rpc", {"method": method})
    except EngineUnavailable:
        raise
    except EngineError:
        return False
    return set(map(str, _results(answer))) == {"True"}


def _shaped(shape: str) -> dict[str, object]:
    """Sampling parameters that ask vLLM itself for any text. This brings the request into vLLM's
    machinery of grammars, where our plugin puts the real grammar.
    """
    return {
        "structured_outputs": {"regex": "(?s:.*)"},
        "extra_args": {"midflight": shape},
        "min_tokens": 0,
    }


def _sampling(request: types.GenerateRequest, ends: tuple[int, ...]) -> dict[str, object]:
    """The sampling parameters in vLLM's own words."""
    s = request.sampling
    given = copied(s, Api.VLLM) | {
        "max_tokens": request.remaining,
        "min_tokens": max(0, s.min_tokens - request.num_output_tokens),
        "top_k": s.top_k or 0,
        "ignore_eos": True,  # the ids below say what ends an answer
        "stop_token_ids": ends,
        "detokenize": bool(s.stop),
        "logprobs": s.top_logprobs + 1 if s.top_logprobs else 0,
    }
    if s.logit_bias:
        given["logit_bias"] = {str(token_id): bias for token_id, bias in s.logit_bias}
    return given
