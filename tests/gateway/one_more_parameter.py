"""Run by `test_one_more_parameter.py` in a process of its own: the list of sampling parameters with one more line, and what comes of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

BEFORE = "    frequency_penalty: float"
LINE = """    typical_p: float = parameter(1.0, Range(0, 1, above=True), Feature.PENALTIES, anthropic=None, native="typical", sglang="typical")\n"""


class _WithLine(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname)
        assert source is not None and source.count(BEFORE) == 1
        return compile(source.replace(BEFORE, LINE + BEFORE), self.path, "exec")


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if fullname != "midflight.types.generation":
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _WithLine(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, _Finder())

from midflight.engines.requests import check_features, check_sampling  # noqa: E402
from midflight.engines.servers.server import ServerRequest  # noqa: E402
from midflight.engines.servers.sglang import SglangServer  # noqa: E402
from midflight.engines.servers.vllm import VllmServer  # noqa: E402
from midflight.engines.streams import ChunkStream  # noqa: E402
from midflight.engines.wire import Submit, client_frame, decode_client_frames, encode  # noqa: E402
from midflight.errors import RequestRejected  # noqa: E402
from midflight.gateway.answers import plan  # noqa: E402
from midflight.gateway.answers.plan import params_for, unlike_the_policy  # noqa: E402
from midflight.gateway.dialects.chat import ChatExchange  # noqa: E402
from midflight.gateway.dialects.completions import CompletionExchange  # noqa: E402
from midflight.gateway.dialects.messages import MessagesExchange  # noqa: E402
from midflight.gateway.dialects.native import NativeExchange  # noqa: E402
from midflight.gateway.dialects.responses import ResponsesExchange  # noqa: E402
from midflight.types import Feature, GenerateRequest, SamplingParams  # noqa: E402

HI = [{"role": "user", "content": "hi"}]
CLIENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (ChatExchange, {"model": "m", "messages": HI}),
    "completions": (CompletionExchange, {"model": "m", "prompt": "hi"}),
    "responses": (ResponsesExchange, {"model": "m", "input": "hi"}),
}
WITH = plan.EngineLimits(max_context=256, vocab_size=99, features=frozenset({Feature.PENALTIES}))
WITHOUT = plan.EngineLimits(max_context=256, vocab_size=99)
DEFAULTS: Any = SamplingParams(max_tokens=8)


def exchange(client: str, value: float | None) -> Any:
    if client == "native":
        return NativeExchange(json.dumps({"text": "hi", "sampling_params": {"typical": value}}).encode())
    kind, body = CLIENTS[client]
    return kind(json.dumps({**body, "typical_p": value}).encode())


def refused(client: str, value: float, limits: Any) -> str | None:
    """By which name; `None` where it is taken."""
    try:
        params_for(exchange(client, value).call, 10, defaults=DEFAULTS, limits=limits)
    except RequestRejected as error:
        assert error.param is not None and str(error).startswith(error.param)
        return error.param
    return None


for client in (*CLIENTS, "native"):
    own = "sampling_params.typical" if client == "native" else "typical_p"
    # accepted, and merged with the session's defaults
    params: Any = params_for(exchange(client, 0.5).call, 10, defaults=DEFAULTS, limits=WITH)
    assert params.typical_p == 0.5 and unlike_the_policy(params, DEFAULTS, limits=WITH)
    silent: Any = params_for(exchange(client, None).call, 10, defaults=DEFAULTS.changed(typical_p=0.7), limits=WITH)
    assert silent.typical_p == 0.7
    # bounded
    assert refused(client, 0, WITH) == refused(client, 1.5, WITH) == own
    # refused where an engine cannot do it, unless it asks for nothing
    assert refused(client, 0.5, WITHOUT) == own
    assert refused(client, 1, WITHOUT) is None

try:
    MessagesExchange(json.dumps({"model": "m", "messages": HI, "max_tokens": 8, "typical_p": 0.5}).encode())
    raise AssertionError("Anthropic's clients do not have it")
except RequestRejected as error:
    assert error.param == "typical_p"

# sent to each server under its name
request = GenerateRequest("a", (1, 2), 2, DEFAULTS.changed(typical_p=0.5))
asked = ServerRequest(request, ChunkStream(eager=True))
vllm: Any = VllmServer(vocab_size=99, max_running=4).body(asked, salt="")[1]
sglang: Any = SglangServer(vocab_size=99, max_running=4, max_context=256).body(asked, salt="")[1]
assert vllm["sampling_params"]["typical_p"] == sglang["sampling_params"]["typical"] == 0.5

# and to our own engines, which check it
(sent,) = map(client_frame, decode_client_frames(encode([Submit(1, request)])))
assert sent == Submit(1, request)
check_sampling(request.sampling)
check_features(request.sampling, frozenset({Feature.PENALTIES}), engine="e")
for check in (
    lambda: check_sampling(DEFAULTS.changed(typical_p=0.0)),
    lambda: check_features(request.sampling, frozenset(), engine="e"),
):
    try:
        check()
    except RequestRejected as error:
        assert error.param in ("typical_p", "penalties")
    else:
        raise AssertionError("taken")
print("one more")
