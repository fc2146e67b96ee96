"""docs/methods.md, made from the SDKs of OpenAI, Anthropic and Google and from the gateway's routes: `python tools/methods.py docs/methods.md`.

Each method of the SDKs is found by looking at the classes of their clients. Which of them has a route here is asked of the gateway's
application; the others have a sentence in the table of refusals.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import openai
from google import genai
from starlette.routing import Match, Route

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.gateway.offered import RecordingControl, ScriptedGenerator, make_gateway

from midflight.gateway.http.http import build_app
from midflight.gateway.http.not_offered import NOT_OFFERED, refusal, row_of

CLIENTS: dict[str, tuple[type, str]] = {
    "openai": (openai.OpenAI, "/v1"),
    "anthropic": (anthropic.Anthropic, ""),
}
"""The client of each SDK, and what its base URL adds to the paths."""
GOOGLE = "google-genai"
SOCKET = "WebSocket"
LOCAL = "local"
"""A method that asks no server."""
VERTEX = "Vertex"
"""A method that asks Google's cloud alone: the client refuses it where a key is given."""

_SENT = re.compile(
    r'self\._(get|post|put|patch|delete|get_api_list)\s*[,(]\s*(?:path_template\(\s*)?f?"([^"]+)"'
)
_OTHER_VERB = re.compile(r'method="(\w+)"')
_SAME_RESOURCE = re.compile(r"self\.([a-z]\w+)\(")
_IMPORTED = re.compile(r"from\s+([.\w]+)\s+import\s+(\w+)")

NEVER = {("POST", "/v1/responses/{}/cancel"), ("GET", "/v1beta/models/{}/operations/{}")}
"""What has a route that refuses every request."""

INTRODUCTION = """# Methods of the SDKs

*A page to look things up in.*

Made by `python tools/methods.py docs/methods.md` from `openai` {openai}, `anthropic` {anthropic} and `google-genai` {google}.

A method does the same with `beta` before it and without.

## Answered

| SDK | resources with their methods |
|---|---|
"""
REFUSED = """
`conversations.update` replaces the `metadata`, and `conversations.delete` leaves its responses. [Responses](responses.md#what-is-kept) says what is kept.

## Refused

`responses.cancel` and `operations.get` are refused, because nothing is made in the background. For these resources, with all that is below them, status 404 (`not_offered`) says why:

| resource | use instead |
|---|---|
"""


@dataclass(frozen=True)
class Method:
    """A method of an SDK, and the request that it sends."""

    sdk: str
    name: str
    verb: str
    path: str
    """Parameters are `{}`."""

    @property
    def plain(self) -> str:
        """The name that the page has for it."""
        return self.name.removeprefix("beta.").removeprefix("aio.")

    @property
    def prefixes(self) -> list[str]:
        """The resources that it is inside of, the outermost first, and its own name."""
        words = self.plain.split(".")
        return [".".join(words[:count]) for count in range(1, len(words) + 1)]

    @property
    def example(self) -> str:
        return self.path.replace("{}", "x")

    @property
    def beginning(self) -> str:
        """Its row in the table of refusals."""
        return row_of(self.example) or ""


@cache
def methods() -> tuple[Method, ...]:
    """All methods of the SDKs, in their order."""
    found: list[Method] = []
    for sdk, (client, prefix) in CLIENTS.items():
        for resource, path in _resources(client):
            found += [_method(sdk, prefix, resource, path, name) for name in _names(resource)]
    for resource, path in _resources(genai.Client):
        found += [_googles(resource, path, name) for name in _names(resource)]
    return (*found, Method(GOOGLE, "aio.live.connect", SOCKET, _LIVE))


def _resources(cls: type, path: str = "") -> Iterator[tuple[type, str]]:
    """The classes of a client that have methods, with the names by which they are reached."""
    for name in dir(cls):
        if name.startswith(("_", "with_raw_response", "with_streaming_response", "aio")):
            continue
        attribute = inspect.getattr_static(cls, name)
        made = getattr(attribute, "func", None) or getattr(attribute, "fget", None)
        found = None if made is None else _class_of(made)
        if found is not None:
            yield found, f"{path}{name}"
            yield from _resources(found, f"{path}{name}.")
    for name, annotation in inspect.get_annotations(cls).items():
        inner = getattr(sys.modules[cls.__module__], str(annotation), None)
        if inspect.isclass(inner) and inner.__module__.startswith(_OF_GOOGLE):
            yield inner, f"{path}{name}"


def _class_of(made: Any) -> type | None:
    """The class of the resource that a property makes."""
    named = made.__annotations__.get("return")
    module = sys.modules[made.__module__]
    found = named
    if isinstance(named, str):
        imported = _IMPORTED.search(inspect.getsource(made))
        if imported is not None:
            found = getattr(importlib.import_module(imported[1], module.__package__), imported[2])
        else:
            found = getattr(module, named, None)
    if not inspect.isclass(found):
        return None
    is_one = ".resources" in found.__module__ or found.__module__.startswith(_OF_GOOGLE)
    return found if is_one else None


def _names(resource: type) -> list[str]:
    found: list[str] = []
    for name in dir(resource):
        method = inspect.getattr_static(resource, name)
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        if not method.__module__.endswith(".basesdk"):
            found.append(name)
    return found


def _method(sdk: str, prefix: str, resource: type, path: str, name: str) -> Method:
    named = f"{path}.{name}"
    if name == "connect":
        return Method(
            sdk, named, SOCKET, f"{prefix}/{path.removeprefix('beta.').replace('.', '/')}"
        )
    verb, sent = _request_of(resource, name)
    if verb == LOCAL:
        return Method(sdk, named, LOCAL, "")
    where = re.sub(r"\{[^}]*\}", "{}", sent.partition("?")[0])
    return Method(sdk, named, verb, prefix + where)


def _request_of(resource: type, name: str, seen: tuple[str, ...] = ()) -> tuple[str, str]:
    """Verb and path of what a method sends. Helpers send what another method of their resource does."""
    source = inspect.getsource(getattr(resource, name))
    sent = _SENT.search(source)
    if sent is not None:
        verb, path = sent.groups()
        other = _OTHER_VERB.search(source)
        if verb == "get_api_list":
            verb = other[1] if other else "get"
        return verb.upper(), path
    for inner in _SAME_RESOURCE.findall(source):
        if inner not in (*seen, name) and hasattr(resource, inner):
            found = _request_of(resource, inner, (*seen, name))
            if found[0] != LOCAL:
                return found
    return _of_resource(resource, name) if name not in _WITHOUT_SERVER else (LOCAL, "")


_WITHOUT_SERVER = ("unwrap", "parse_unverified", "verify_signature", "thread")


def _of_resource(resource: type, name: str) -> tuple[str, str]:
    """A helper whose request is made elsewhere: it begins with what its resource creates, or lists."""
    for other in ("create", "list", "retrieve"):
        if other != name and hasattr(resource, other):
            return _request_of(resource, other, (name,))
    return LOCAL, ""


# --- Google's SDK, whose methods name their path in a variable --------------------------------------

_OF_GOOGLE = "google.genai"
_LIVE = "/ws/google.ai.generativelanguage.v1beta.GenerativeService.BidiGenerateContent"
_NAMED = re.compile(r"path = f?'((?!\{path\})[^']+)'(?!\.format_map)")
_ASKED = re.compile(r"_api_client\.(?:request|request_streamed)\(\s*'(\w+)'")
_GENERATED = re.compile(r'method="(\w+)",\s*path="(/upload)?/\{api_version\}(/[^"]*)"')
_INNER = re.compile(r"(?:self|super\(\))\.(\w+)\b")
_STANDS_FOR: dict[str, str] = {
    "models": "models/{}",
    "caches": "cachedContents/{}",
    "tunings": "tunedModels/{}",
    "operations": "models/{}/operations/{}",
    "environments.files": "environments/{}",
    "file_search_stores": "fileSearchStores/{}",
    "file_search_stores.documents": "fileSearchStores/{}/documents/{}",
}
"""What a path that is a name alone holds, by resource."""


def _googles(resource: type, path: str, name: str) -> Method:
    verb, sent = _googles_request(resource, name) or (LOCAL, "")
    if verb in (LOCAL, VERTEX):
        return Method(GOOGLE, f"{path}.{name}", verb, "")
    sent = sent.partition("?")[0].replace("{models_url}", "models")
    sent = sent.replace("{parent}/documents", "fileSearchStores/{}/documents")
    if sent.startswith("upload/"):
        sent = "/" + sent.replace("{api_version}", "v1beta")
    first = re.match(r"\{\w+\}", sent)
    if first is not None:
        stands_for = "models/{}" if first[0] == "{model}" else _STANDS_FOR[path]
        sent = stands_for + sent[first.end() :]
    sent = sent.replace("{file_search_store_name}", "fileSearchStores/{}")
    sent = re.sub(r"\{[^}]*\}", "{}", sent)
    return Method(GOOGLE, f"{path}.{name}", verb, sent if sent[0] == "/" else f"/v1beta/{sent}")


def _googles_request(
    resource: type, name: str, seen: tuple[str, ...] = ()
) -> tuple[str, str] | None:
    """Verb and path of what a method sends, by itself or by another method of its resource."""
    found: tuple[str, str] | None = None
    for cls in resource.__mro__:
        if name not in cls.__dict__ or not inspect.isfunction(cls.__dict__[name]):
            continue
        source = inspect.getsource(cls.__dict__[name])
        generated = _GENERATED.search(source)
        if generated is not None:
            return generated[1], f"{generated[2] or ''}/v1beta{generated[3]}"
        paths = _NAMED.findall(source)
        asked = _ASKED.search(source)
        if paths and asked is not None:
            of_cloud = "if not self._api_client.vertexai:\n      raise" in source
            return (VERTEX, "") if of_cloud else (asked[1].upper(), paths[-1])
        if "_api_client.download_file(" in source:
            files = re.search(r"path = \(?\s*f'([^']+)'", source)
            return "GET", files[1] if files else ""
        internal = re.search(r"self\._internal\.(\w+)\(", source)
        if internal is not None:
            module = importlib.import_module("google.genai._gaos._internal")
            return _googles_request(module.Internal, internal[1])
        for inner in _INNER.findall(source):
            if inner in (*seen, name):
                continue
            found = _googles_request(resource, inner, (*seen, name)) or found
            if found is not None and found[0] != VERTEX:
                return found
    return found


@cache
def _routes() -> Sequence[Route]:
    app: Any = build_app(make_gateway(ScriptedGenerator()), RecordingControl(), control_token="t")  # type: ignore[arg-type]
    return [route for route in app._rest.routes if isinstance(route, Route)]


def is_answered(method: Method) -> bool:
    """Whether the gateway has a route for it."""
    scope = {"type": "http", "method": method.verb, "path": method.example, "headers": []}
    return any(route.matches(scope)[0] is Match.FULL for route in _routes())


def page() -> str:
    """The page, as Markdown."""
    versions = {"openai": openai.__version__, "anthropic": anthropic.__version__}
    asking = [method for method in methods() if method.verb not in (LOCAL, VERTEX)]
    answered = [method for method in asking if is_answered(method)]
    refused = [method for method in asking if not is_answered(method)]
    parts = [INTRODUCTION.format(**versions, google=genai.__version__)]
    parts += _rows_of_answered(answered)
    parts.append(REFUSED)
    parts += _rows_of_refused(refused, {name for method in answered for name in method.prefixes})
    return "".join(parts)


def _rows_of_answered(answered: Sequence[Method]) -> Iterator[str]:
    """A row for each SDK."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for method in answered:
        if (method.verb, method.path) not in NEVER:
            resource, _, name = method.plain.rpartition(".")
            found.setdefault(method.sdk, {}).setdefault(resource, {})[name] = None
    for sdk, resources in found.items():
        named = [f"`{resource}`: {', '.join(names)}" for resource, names in resources.items()]
        yield f"| {sdk} | {'; '.join(named)} |\n"


def _rows_of_refused(refused: Sequence[Method], partly: Set[str]) -> Iterator[str]:
    """A row for each remedy. A resource stands in the row of most of its methods, and none of them
    is answered; what belongs to another row is named there by itself.
    """
    remedies: dict[str, Counter[str]] = {}
    for method in refused:
        for name in method.prefixes:
            remedies.setdefault(name, Counter())[_remedy(method)] += 1
    rows: dict[str, dict[str, None]] = {}
    for method in sorted(refused, key=lambda method: method.beginning):
        remedy = _remedy(method)
        fitting = [name for name in method.prefixes if name not in partly]
        found = next(name for name in fitting if remedies[name].most_common(1)[0][0] == remedy)
        rows.setdefault(remedy, {})[f"`{found}`"] = None
    for remedy, names in rows.items():
        yield f"| {', '.join(names)} | {remedy} |\n"


def _remedy(method: Method) -> str:
    return NOT_OFFERED[method.beginning].rpartition("; ")[2]


def refused_by(method: Method) -> str:
    """The sentence that refuses it."""
    fault = refusal(method.verb, method.example, {})
    assert fault is not None, f"{method.verb} {method.example} has no row in not_offered.py"
    body: Any = fault.body
    return str(body["error"]["message"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
