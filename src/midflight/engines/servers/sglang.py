"""SGLang's wire: tokens in and out by `/generate`, pauses by `/pause_generation`, weights from a
folder in memory.

It was tried with 0.5.22 and 0.5.23. SGLang 0.5.20, the first with spans of versions, dies when a
pause takes requests back, and 0.5.21 has no direct way. docs/engines.md says how it is started and
why.
"""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import cast

import msgspec

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
from midflight.types import (
    Capabilities,
    Feature,
    Finish,
    FinishReason,
    GenerateRequest,
    LogprobKind,
    MemoryPart,
    PauseMode,
    UInt8,
    Version,
)
from midflight.types.generation import Api, copied

RELEASES = Releases("SGLang", oldest="0.5.22", tried="0.5.23")
_NEEDED = (
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/update_weight_version",
)
_TAGS = {MemoryPart.WEIGHTS: "weights", MemoryPart.KEYS: "kv_cache"}
_MODES = {PauseMode.KEEP: "in_place", PauseMode.RECOMPUTE: "retract", PauseMode.ABORT: "abort"}
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
_FEATURES = frozenset({Feature.LOGIT_BIAS, Feature.TOP_LOGPROBS})
"""The features of every SGLang. Penalties come in addition if it runs without the overlap
scheduler. That scheduler counts each token a step late, and counts a token of the prompt in its
place.
"""
GRAMMAR_BACKEND = "midflight"
"""The backend of our plugin. A server that was started with it goes on in the middle of a
grammar.
"""
_REFUSED = 400
_INEXACT = (
    "engine.deterministic is set, and SGLang was started without "
    "--enable-deterministic-inference; start it with that, or remove engine.deterministic."
)

_Entry = tuple[float | None, int, str | None]
"""Log-probability, id, text."""


class _SglangFinish(msgspec.Struct, frozen=True):
    type: str
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class _SglangSpan(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct, frozen=True):
    completion_tokens: int = 0
    finish_reason: _SglangFinish | None = None
    output_token_logprobs: tuple[_Entry, ...] = ()
    output_top_logprobs: tuple[tuple[_Entry, ...] | None, ...] = ()
    weight_versions: tuple[_SglangSpan, ...] = ()
    routed_experts: str | None = None
    """int32 [T, layers, chosen] as base64"""


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    code: int | str | None = None


class _SglangEvent(msgspec.Struct, frozen=True):
    output_ids: tuple[int, ...] = ()
    meta_info: _Meta | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_SglangEvent).decode
_part = partial(part, of="SGLang 0.5.22 or newer")
_number_of = partial(number, of="SGLang 0.5.22 or newer")


class SglangReader:
    """Reads SGLang's events. An event has all tokens so far, or with incremental streaming those
    since the last event, which an abort repeats. Only `completion_tokens` says how many are new.
    """

    def __init__(
        self, request: GenerateRequest, *, num_experts: int = 0, num_choices: int = 0
    ) -> None:
        """`num_experts` is the number of experts of a layer, if the server records the choices of a
        mixture. There are `num_choices` for each token.
        """
        self._num_tops = request.sampling.top_logprobs
        self._num_experts = num_experts
        self._num_choices = num_choices
        self._num_tokens = 0

    def read(self, event: bytes) -> EventTokens:
        try:
            said = _decode(event)
        except msgspec.DecodeError as error:
            raise EngineUnavailable(
                f"reading SGLang's answer {event[:200]!r}: {error}. Use SGLang 0.5.22 or newer."
            ) from error
        if said.error is not None and _is_refusal(said.error):
            raise RequestRejected(f"SGLang refused the request: {said.error.message}.")
        if said.error is not None or said.meta_info is None:
            raise EngineUnavailable(
                f"SGLang ended an answer with {event[:300]!r}. Look at its log."
            )
        meta = said.meta_info
        num_new = self._num_new(meta, num_ids=len(said.output_ids))
        self._num_tokens += num_new
        logprobs = _last(meta.output_token_logprobs, num_new)
        tops: tuple[tuple[tuple[int, float], ...], ...] = ()
        if self._num_tops:
            entries = _last(meta.output_top_logprobs, num_new)
            tops = tuple([self._likeliest(each) for each in entries])
        return EventTokens(
            token_ids=_last(said.output_ids, num_new),
            logprobs=tuple([_number(logprob) for logprob, _, _ in logprobs]),
            top_logprobs=tops,
            finish=None if meta.finish_reason is None else _finish(meta.finish_reason),
            spans=tuple((s.version, s.start, s.end) for s in meta.weight_versions),
            experts=self._experts(meta),
        )

    def _experts(self, meta: _Meta) -> UInt8 | None:
        """The record of experts, from the last event only. SGLang repeats with every event all that
        it has so far, and only the last has the whole record.
        """
        if meta.finish_reason is None or meta.routed_experts is None or not self._num_experts:
            return None
        return recorded_experts(
            meta.routed_experts, num_choices=self._num_choices, num_experts=self._num_experts
        )

    def _num_new(self, meta: _Meta, *, num_ids: int) -> int:
        """The number of new tokens in the event. It is 0 for an abort that does not bring them:
        these tokens are lost, and made again when the request is resumed.
        """
        num_new = max(0, meta.completion_tokens - self._num_tokens)
        if num_new <= min(num_ids, len(meta.output_token_logprobs)):
            return num_new
        if meta.finish_reason is not None and meta.finish_reason.type == "abort":
            return 0
        raise EngineUnavailable(
            f"reading SGLang's answer: of {num_new} new tokens it brought {num_ids} ids and "
            f"{len(meta.output_token_logprobs)} log-probabilities. Use SGLang 0.5.22 or newer."
        )

    def _likeliest(self, entries: tuple[_Entry, ...] | None) -> tuple[tuple[int, float], ...]:
        if entries is None:
            return ()
        return tuple([(token_id, _number(p)) for p, token_id, _ in entries[: self._num_tops]])


def _is_refusal(error: _Error) -> bool:
    """True if the request itself is at fault. A server that has lost an adapter gives the same
    code.
    """
    return error.code == _REFUSED and "LoRA adapter" not in error.message


def _last(items: tuple, num: int) -> tuple:  # type: ignore[type-arg]
    return items[len(items) - num :]


def _number(logprob: float | None) -> float:
    """A log-probability. JSON has no infinity, so `None` is minus infinity, which is impossible for
    a sampled token.
    """
    return float("-inf") if logprob is None else logprob


def _finish(said: _SglangFinish) -> Finish:
    if said.type == "abort" and said.status_code is not None:
        if _REFUSED <= said.status_code < 500:
            raise RequestRejected(f"SGLang refused the request: {said.message}.")
        raise EngineUnavailable(f"SGLang gave up a request: {said.message}. Look at its log.")
    reason = _REASONS.get(said.type)
    if reason is None:
        raise EngineUnavailable(
            f"SGLang ended an answer with finish_reason {said.type!r}. Look at its log."
        )
    return Finish(reason, said.matched if reason is FinishReason.STOP else None)


class SglangServer:
    """Implements `Server`."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_running: int,
        max_context: int,
        theirs: bool = False,
        deterministic: bool = False,
        num_experts: int = 0,
        num_choices: int = 0,
        num_adapters: int = 0,
        direct: bool = False,
    ) -> None:
        """With `direct` versions come straight to the server's workers, which swap them between two
        steps. With `theirs` other people started the server, so it runs as many requests as it
        says. `num_experts` is the number of experts of a mixture's layer, if the server has to
        report which it chose: `num_choices` of all layers for each token. `num_adapters` is the
        number of versions that the server has to keep, if versions are adapters.
        """
        self.num_adapters = num_adapters
        self._vocab_size = vocab_size
        self._max_running = max_running
        self._max_context = max_context
        self._theirs = theirs
        self._deterministic = deterministic
        self._num_experts = num_experts if num_choices else 0
        self._num_choices = num_choices
        self._records = False
        self._room = max_context
        """The longest prompt, some tokens less than the server's context. It refuses a longer one,
        and an answer to be resumed is a prompt.
        """
        self._overlaps = True
        self._counts_steps = False
        """True if our plugin in the server counts the tokens of a step that is under way when
        weights change.
        """
        self._direct = direct
        self._swaps = False
        self._seeds = deterministic
        """True if the server's noise is a function of seed and position, as ours is, so that it
        survives a resume.
        """

    @property
    def late_labels(self) -> int:
        """The token of the step that the overlap scheduler has under way, unless the server itself
        counts it.
        """
        return 1 if self._overlaps and not self._counts_steps else 0

    async def attach(self, client: ServerClient) -> ServerDescription:
        paths = await client.paths()
        if "/server_info" not in paths:
            raise EngineError(
                f"attaching to {client.url}: no SGLang listens there; check the URL and --engine "
                "(engine.urls, engine.kind)."
            )
        info = await client.get("/server_info")
        version = str(_part(info, "version"))
        caution = RELEASES.caution(version, url=client.url)
        missing = [path for path in _NEEDED if path not in paths]
        if missing:
            raise EngineError(
                f"attaching to {client.url}: SGLang {version} has no {missing[0]}; use "
                f"{RELEASES.tried}."
            )
        settings = cast(dict[str, object], info)
        self._check(client, settings)
        await self.resume(client)
        model = await client.get("/model_info")
        running = self._max_running
        if _part(info, "max_running_requests") is not None:
            running = _number_of(info, "max_running_requests")
        features = self._features(settings)
        self._room = min(_number_of(info, "max_req_input_len"), self._max_context)
        return ServerDescription(
            num_workers=_workers(settings),
            caution=caution,
            capabilities=Capabilities(
                pause_modes=frozenset(PauseMode),
                logprob_kind=LogprobKind.TEMPERATURE,
                honours_seed=self._seeds,
                versions_per_token=True,
                stops_on_strings=True,
                aborts_single_requests=True,
                stages_weights=True,
                side_by_side=self.num_adapters > 0,
                max_context=self._room,
                vocab_size=self._vocab_size,
                max_running=running if self._theirs else min(running, self._max_running),
                max_keys=_keys(info),
                features=features,
                commit_mode=PauseMode.KEEP if self._swaps else PauseMode.RECOMPUTE,
            ),
            label=str(_part(model, "weight_version")),
            model=str(_part(model, "model_path")),
        )

    def _check(self, client: ServerClient, info: Mapping[str, object]) -> None:
        """Raises `EngineError` if the server was started without an option that it was
        asked for.
        """
        if self._deterministic and info.get("enable_deterministic_inference") is not True:
            raise EngineError(f"attaching to {client.url}: {_INEXACT}")
        if self.num_adapters and not _has_room(info, self.num_adapters):
            raise EngineError(
                f"attaching to {client.url}: SGLang was started without room for "
                f"{self.num_adapters} adapters (rollout.max_staleness + 2); start it with "
                f"--enable-lora and --max-loras-per-batch {self.num_adapters}, or set lora.merged "
                "= true."
            )

    def _features(self, info: Mapping[str, object]) -> frozenset[Feature]:
        """Takes note of what the server records and how it samples, from the options that it was
        started with. Returns its other features.
        """
        self._records = bool(self._num_experts) and info.get("enable_return_routed_experts") is True
        self._overlaps = info.get("disable_overlap_schedule") is not True
        has_plugin = info.get("grammar_backend") == GRAMMAR_BACKEND
        self._counts_steps = has_plugin
        has_plugin_on_cpu = has_plugin and info.get("device") == "cpu"
        # On a GPU it loads weights, and a step may be under way beside that.
        self._swaps = self._direct and has_plugin_on_cpu
        self._seeds = self._deterministic or has_plugin_on_cpu
        features = set(_FEATURES)
        if not self._overlaps:
            features.add(Feature.PENALTIES)
        if has_plugin:
            features.add(Feature.GRAMMARS)
        return frozenset(features)

    async def label(self, client: ServerClient) -> str:
        return str(_part(await client.get("/model_info"), "weight_version"))

    async def relabel(self, client: ServerClient, version: Version) -> None:
        await client.post(
            "/update_weight_version", {"new_version": str(version), "abort_all_requests": False}
        )

    def body(self, asked: ServerRequest, *, salt: str) -> tuple[str, dict[str, object]]:
        """See `Server`. The body has the seed if the server uses seeds and the client asked for
        one. A deterministic server would give all requests without a seed the same one.
        """
        request = asked.request
        seeded = self._deterministic or (self._seeds and request.seeded)
        room = self._room - len(request.input_ids)
        sampling = _sampling(request, asked.ends, room=room, seeded=seeded)
        if asked.shape:
            sampling |= {"ebnf": asked.shape, "min_new_tokens": 0}  # our plugin handles these
        body: dict[str, object] = {
            "rid": asked.id,
            "input_ids": request.input_ids,
            "stream": True,
            "return_logprob": True,
            "top_logprobs_num": request.sampling.top_logprobs,
            "extra_key": salt,
            "sampling_params": sampling,
        }
        if self._records:
            body["return_routed_experts"] = True
        if asked.adapter:
            body["lora_path"] = asked.adapter
        return "/generate", body

    def reader(self, request: GenerateRequest) -> SglangReader:
        return SglangReader(
            request,
            num_experts=self._num_experts if self._records else 0,
            num_choices=self._num_choices,
        )

    async def abort(self, client: ServerClient, request_id: str) -> None:
        await client.post("/abort_request", {"rid": request_id})

    async def pause(self, client: ServerClient, mode: PauseMode) -> None:
        await client.post("/pause_generation", {"mode": _MODES[mode]})

    async def settle(self, client: ServerClient) -> None:
        """See `Server`. SGLang says that it is paused before its scheduler has received the pause.
        The scheduler itself reads this question, in order.
        """
        await client.settle("/server_info")

    async def resume(self, client: ServerClient) -> None:
        await client.post("/continue_generation", {})

    async def sleep(self, client: ServerClient) -> None:
        """See `Server`. What captured graphs hold stays on the device."""
        tags = [_TAGS[part] for part in (MemoryPart.KEYS, MemoryPart.WEIGHTS)]
        await client.post("/release_memory_occupation", {"tags": tags})

    async def wake(self, client: ServerClient, part: MemoryPart) -> None:
        await client.post("/resume_memory_occupation", {"tags": [_TAGS[part]]})

    async def load(
        self, client: ServerClient, folder: Path, version: Version, *, recompute: bool
    ) -> None:
        """See `Server`. While requests hold keys, SGLang refuses to clear its cache after the
        weights have changed. Only retracted requests hold no keys.
        """
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": recompute}
        await client.post("/update_weights_from_disk", body)

    async def load_adapter(self, client: ServerClient, name: str, folder: str) -> None:
        await client.post("/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def unload_adapter(self, client: ServerClient, name: str) -> None:
        await client.post("/unload_lora_adapter", {"lora_name": name})


def _keys(info: object) -> int | None:
    """The number of tokens that the server's cache holds, or `None` if it does not say."""
    told = cast(dict[str, object], info).get("max_total_num_tokens")
    return told if isinstance(told, int) and told > 0 else None


def _sampling(
    request: GenerateRequest, ends: tuple[int, ...], *, room: int, seeded: bool
) -> dict[str, object]:
    """The sampling parameters in SGLang's own words. It refuses a request that could become longer
    than its context.
    """
    s = request.sampling
    most = min(request.remaining, room)
    given = copied(s, Api.SGLANG) | {
        "max_new_tokens": most,
        "min_new_tokens": min(most, max(0, s.min_tokens - request.num_output_tokens)),
        "top_k": s.top_k or -1,
        "ignore_eos": s.ignore_eos,  # then our ids do not end it either: `cut` does
        "stop_token_ids": ends,
    }
    if seeded:
        given["sampling_seed"] = s.seed % 2**63  # it takes 64 bits with a sign
    if s.logit_bias:
        given["logit_bias"] = {str(token_id): bias for token_id, bias in s.logit_bias}
    return given


def _workers(info: Mapping[str, object]) -> int | None:
    """The number of processes that compute for the server, or `None` if it does not say."""
    sizes = [info.get(name) for name in ("tp_size", "pp_size", "dp_size")]
    if None in sizes:
        return None
    return math.prod(size for size in sizes if isinstance(size, int))


def _has_room(info: Mapping[str, object], num_adapters: int) -> bool:
    """True if the server was started with room for so many adapters. A limit that the server does
    not name does not exist.
    """
    if not info.get("enable_lora"):
        return False
    for name in ("max_loras_per_batch", "max_loaded_loras"):
        limit = info.get(name)
        if limit is not None and cast(int, limit) < num_adapters:
            return False
    return True
