"""The lookups that SGLang and vLLM servers offer beside answers: the model, the load, and the token
ids of texts.

Routes of those servers that have no meaning here answer 501, with a sentence that says what to use
instead.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from midflight.errors import RequestRejected, Unauthorized
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.dialects.chat import ChatBody, chat_call
from midflight.gateway.dialects.completions import PROMPT_IDS, sources, token_ids
from midflight.gateway.dialects.exchange import token_text
from midflight.gateway.dialects.fields import RequestBody, parse
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.gateway.sessions.request import CompletionCall, Messages
from midflight.gateway.sessions.session import Session
from midflight.types import Json, Version
from midflight.version import __version__
from midflight.wire.edge import key_of, plain_fault, read_body
from midflight.wire.routes import fault_answer, holds, json_answer, route

_TRAINER = (
    "the run's trainer publishes weights; a trainer of yours does by POST /midflight/v1/weights"
)
NOT_HERE: Mapping[str, str] = {
    "/update_weights_from_disk": _TRAINER,
    "/update_weights_from_tensor": _TRAINER,
    "/update_weights_from_distributed": _TRAINER,
    "/update_weights_from_ipc": _TRAINER,
    "/init_weights_update_group": _TRAINER,
    "/destroy_weights_update_group": _TRAINER,
    "/update_weight_version": (
        "a version is numbered by whoever publishes it: POST /midflight/v1/weights"
    ),
    "/init_weight_transfer_engine": _TRAINER,
    "/start_weight_update": _TRAINER,
    "/update_weights": _TRAINER,
    "/finish_weight_update": _TRAINER,
    "/get_weights_by_name": "read the files of the version that was published, or of a checkpoint",
    "/release_memory_occupation": (
        'engines sleep in the trainer\'s turn, not for a client: set engine.share = "time"'
    ),
    "/resume_memory_occupation": "engines wake when the trainer's turn is over",
    "/sleep": 'engines sleep in the trainer\'s turn (engine.share = "time"): POST /pause',
    "/wake_up": "engines wake when the trainer's turn is over: POST /resume",
    "/load_lora_adapter": "there is one policy: set lora.rank before the run",
    "/unload_lora_adapter": "there is one policy: set lora.rank before the run",
    "/collective_rpc": "engines run no code of their clients",
    "/start_profile": "`midflight trace` draws what a run did",
    "/stop_profile": "`midflight trace` draws what a run did",
    "/open_session": "POST /midflight/v1/sessions opens one",
    "/close_session": "POST /midflight/v1/sessions/ID/end ends one",
    "/encode": "the model generates, and embeds nothing",
    "/concate_and_append_request": (
        "send the whole prompt; engines find common prefixes by themselves"
    ),
}
"""Routes of those servers that do not exist here, each with what to do instead."""


class EngineLoad(Protocol):
    """The load of the engines. `Control` implements it."""

    @property
    def num_active(self) -> int:
        """Answers that engines have, or that wait for one."""
        ...

    def served_version(self) -> Version: ...


class TokenizeText(RequestBody):
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatBody):
    model: str | None = None  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    """Ignored, here and in `TokenizeText`: the ids are those that a request would send."""
    return_token_strs: bool | None = None


class IdsBody(RequestBody):
    model: str | None = None
    tokens: PROMPT_IDS
    skip_special_tokens: bool | None = None
    """Ignored: all ids are written."""


class ServerRoutes:
    """The lookups of both servers. A session does not record them. They are open to all clients
    that may get answers, and to the operator.
    """

    def __init__(
        self, gateway: Gateway, load: EngineLoad, *, ready: Callable[[], bool], token: str | None
    ) -> None:
        """`ready` returns True if an engine is routable. `token` is the operator's."""
        self._gateway = gateway
        self._load = load
        self._ready = ready
        self._token = token

    def routes(self) -> Sequence[BaseRoute]:
        asked = {
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/get_weight_version": self._weight_version,
            "/weight_version": self._weight_version,
            "/weight_info": self._weight_version,
            "/v1/loads": self._loads,
            "/get_load": self._loads,
            "/workers": self._workers,
        }
        written = {
            "/tokenize": self._tokenize,
            "/v1/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/detokenize": self._detokenize,
        }
        plain = {
            "/health_generate": self._health,
            "/ready": self._health,
            "/version": self._version,
        }
        found = [route(path, verb, method="GET") for path, verb in asked.items()]
        for prefix in ("/s/{token}", ""):
            found += [route(prefix + path, verb) for path, verb in written.items()]
        found += [route(path, verb, method="GET") for path, verb in plain.items()]
        return found

    def not_here(self) -> Sequence[BaseRoute]:
        """The routes that are refused. They must come after all others, because an application that
        adds routes of its own may have some of these.
        """
        return [
            route(path, self._refuse, method=method, token=self._token)
            for path in NOT_HERE
            for method in ("POST", "GET")
        ]

    def _session(self, request: Request) -> Session | None:
        """The session of the request. `None` for the operator. Raises the gateway's refusal for any
        other request.
        """
        try:
            return self._gateway.session_for(
                path_token=request.path_params.get("token"),
                api_key=key_of(request.scope),
            )
        except (Unauthorized, RequestRejected):
            if self._token is None or "token" in request.path_params:
                raise
            if not holds(request, self._token):
                raise
            return None

    def _weights(self) -> str:
        return str(self._load.served_version())

    async def _model_info(self, request: Request) -> Response:
        self._session(request)
        name = self._gateway.model
        limits = self._gateway.limits
        told: Json = {
            "model_path": name,
            "served_model_name": name,
            "tokenizer_path": name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self._weights(),
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "capabilities": {
                "max_context": limits.max_context,
                "vocab_size": limits.vocab_size,
                "features": list[Json](sorted(limits.features)),
            },
        }
        return json_answer(told)

    async def _server_info(self, request: Request) -> Response:
        self._session(request)
        limits = self._gateway.limits
        told: Json = {
            "version": __version__,
            "model_path": self._gateway.model,
            "served_model_name": self._gateway.model,
            "weight_version": self._weights(),
            "context_length": limits.max_context,
            "max_total_num_tokens": limits.max_context,
            "dp_size": 1,
            "tp_size": 1,
            "internal_states": [self._state()],
        }
        return json_answer(told)

    def _state(self) -> dict[str, Json]:
        running = self._gateway.num_running
        active = self._load.num_active
        return {
            "dp_rank": 0,
            "num_running_reqs": active,
            "num_waiting_reqs": max(0, running - active),
            "num_total_reqs": max(running, active),
        }

    async def _weight_version(self, request: Request) -> Response:
        self._session(request)
        return json_answer({"weight_version": self._weights()})

    async def _loads(self, request: Request) -> Response:
        self._session(request)
        state = self._state()
        if request.url.path == "/v1/loads":
            return json_answer({"loads": [state]})
        return json_answer([{**state, "num_reqs": state["num_total_reqs"]}])

    async def _workers(self, request: Request) -> Response:
        """The list that a router gives. It names this gateway only, not the engines behind it."""
        self._session(request)
        worker: Json = {
            "id": "midflight",
            "url": self._gateway.address,
            "model_id": self._gateway.model,
            "is_healthy": self._ready(),
        }
        return json_answer({"workers": [worker], "total": 1})

    async def _health(self, request: Request) -> Response:
        """Generates no token for the check. An engine that has work but makes no token is in
        quarantine anyway.
        """
        if self._ready():
            return json_answer({"status": "ok"})
        return json_answer({"status": "no engine is routable"}, status=503)

    async def _version(self, request: Request) -> Response:
        return json_answer({"version": __version__})

    async def _tokenize(self, request: Request) -> Response:
        """The ids that a completion of this prompt, or a chat of these messages, would send. Waits
        for the body.
        """
        session = self._session(request)
        sent = await read_body(request.receive)
        unread = UnreadFields()
        body: TokenizeText | TokenizeChat
        if b'"messages"' in sent:
            body = parse(TokenizeChat, sent, unread=unread)
            call = chat_call(body, unread)
        else:
            body = parse(TokenizeText, sent, unread=unread)
            call = CompletionCall(sources(body.prompt))
        await self._gateway.check_lengths(call, num_bytes=len(sent))
        source = call.sources[0]
        tokenizer = self._gateway.tokenizer
        renders = isinstance(body, TokenizeChat) and body.add_generation_prompt is False
        if renders and isinstance(source, Messages):
            tools = [tool.as_json() for tool in source.tools] or None
            text = tokenizer.render(source.messages, tools=tools, options=source.options)
            ids = tokenizer.encode(text)
        else:
            planner = session or Session(
                "operator", tokenizer, key=None, sampling=None, tracked=False
            )
            ids = planner.plan(source).ids
        words: Json = None
        if body.return_token_strs:
            words = [token_text(tokenizer, i) for i in ids]
        told: Json = {
            "count": len(ids),
            "max_model_len": self._gateway.limits.max_context,
            "tokens": list(ids),
            "token_strs": words,
        }
        return json_answer(told)

    async def _detokenize(self, request: Request) -> Response:
        """The text of the ids. vLLM's clients call it `prompt`, SGLang's clients `text`. Waits for
        the body.
        """
        self._session(request)
        body = parse(IdsBody, await read_body(request.receive), unread=UnreadFields())
        ids = token_ids(body.tokens, "tokens").ids
        bad = [i for i in ids if i >= self._gateway.limits.vocab_size]
        if bad:
            raise RequestRejected(
                f"tokens holds {bad[0]}: send ids from 0 to {self._gateway.limits.vocab_size - 1}.",
                param="tokens",
            )
        text = self._gateway.tokenizer.decode(ids)
        return json_answer({"prompt": text, "text": text})

    async def _refuse(self, request: Request) -> Response:
        path = request.url.path
        return fault_answer(
            plain_fault(501, f"{path} is not there: {NOT_HERE[path]}.", "not_implemented")
        )
