"""Bodies of real clients: how they are recorded, scrubbed and read. One file for each client and version, in `bodies`.

With `MIDFLIGHT_RECORD=FOLDER` in the environment, the servers of `make test-clients-all` and `make test-coding-agents` write what they are sent
into that folder; `python -m tests.corpus.recorded FOLDER` brings it here. What is kept is the form: names, switches, short words.
Sentences of a client's own, paths and ids are replaced, each id by the same number everywhere in its body.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BODIES = Path(__file__).parent / "bodies"
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/generate")
GOOGLES = re.compile(r"/v1beta/models/[^/]+:(generateContent|streamGenerateContent|countTokens)$")
STREAMED = "?alt=sse"
_AGENT = re.compile(r"^(?P<name>[A-Za-z][\w.-]*(?:/[A-Z]\w+)?)[/ ](?P<version>\d[\w.-]*)")
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{12,}")
_PATH = re.compile(r"/(?:tmp|work|root|home|opt)/[^\s\"'\\]*")
_LONGEST = 40
"""Letters of a text that is kept; a longer one is kept if it holds no sentence."""


@dataclass(frozen=True)
class Recorded:
    """A request, and which of its fields the gateway named as without effect."""

    client: str
    version: str
    path: str
    features: str
    ignored: str
    body: Any


def scrubbed(body: Any) -> Any:
    """The body without sentences, paths and ids. Names and numbers stay as they are."""
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        found = match[0]
        digits = f"{numbers.setdefault(found, len(numbers) + 1):0{len(found.replace('-', ''))}d}"
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}" if "-" in found else digits

    def part(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: part(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [part(inner) for inner in value]
        if not isinstance(value, str):
            return value
        if len(value) > _LONGEST and value.count(" ") > 3 and not _is_json(value):
            return f"(text of {len(value)} letters)"
        return _PATH.sub("/scratch", _ID.sub(number, value))

    return part(body)


def _is_json(text: str) -> bool:
    """Such as the arguments of a call, which must stay what they are."""
    try:
        return isinstance(json.loads(text), dict | list)
    except ValueError:
        return False


def features(body: dict[str, Any], path: str = "") -> str:
    """What of the dialect a body uses, in words."""
    if GOOGLES.match(path.removesuffix(STREAMED)):
        return features_of_contents(body, path)
    messages = body.get("messages", body.get("input"))
    messages = messages if isinstance(messages, list) else []
    kinds = {str(m.get("role", m.get("type"))) for m in messages if isinstance(m, dict)} | {
        str(part.get("type"))
        for m in messages
        if isinstance(m, dict) and isinstance(m.get("content"), list)
        for part in m["content"]
        if isinstance(part, dict)
    }
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    found = {
        "streamed": body.get("stream"),
        "tools": body.get("tools"),
        "a call into a namespace": any(isinstance(m, dict) and m.get("namespace") for m in messages),
        "a forced tool": body.get("tool_choice") not in (None, "auto", "none", {"type": "auto"}),
        "results of tools": kinds & {"tool", "tool_result", "function_call_output", "custom_tool_call_output"},
        "a schema": (body.get("response_format") or {}).get("type") == "json_schema"
        or ((body.get("text") or {}).get("format") or {}).get("type") == "json_schema"
        or (body.get("output_config") or {}).get("format"),
        "thinking": body.get("thinking") or body.get("reasoning") or body.get("reasoning_effort"),
        "a prefill": last.get("role") == "assistant" and not last.get("tool_calls"),
        "logprobs": body.get("logprobs") or body.get("top_logprobs") or body.get("return_logprob"),
    }
    return ", ".join(name for name, value in found.items() if value) or "plain"


def features_of_contents(body: dict[str, Any], path: str) -> str:
    """The same for Google's dialect."""
    config = body.get("generationConfig", {})
    held = {name for content in body.get("contents", ()) for part in content.get("parts", ()) for name in part}
    found = {
        "streamed": path.endswith(STREAMED),
        "tools": body.get("tools"),
        "a forced tool": body.get("toolConfig", {}).get("functionCallingConfig", {}).get("mode") == "ANY",
        "results of tools": "functionResponse" in held,
        "a schema": config.get("responseSchema") or config.get("responseJsonSchema"),
        "thinking": config.get("thinkingConfig"),
        "logprobs": config.get("responseLogprobs"),
    }
    return ", ".join(name for name, value in found.items() if value) or "plain"


def refers_to_what_is_stored(body: dict[str, Any]) -> bool:
    """Such a body means nothing without the ones before it."""
    return bool(body.get("previous_response_id") or body.get("conversation")) or '"item_reference"' in json.dumps(body)


def client_of(headers: dict[str, str]) -> tuple[str, str]:
    """Name and version: a key `sk-client-NAME` says the name, else the head `user-agent` both. An unknown version is empty."""
    key = headers.get("x-api-key") or headers.get("x-goog-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
    found = _AGENT.match(headers.get("user-agent", ""))
    if key.startswith("sk-client-"):
        return key.removeprefix("sk-client-"), ""
    return (found["name"].replace("/", "-"), found["version"]) if found else ("unknown", "")


class Recorder:
    """An application that keeps what it is sent and answered with 200."""

    def __init__(self, app: Any, folder: Path) -> None:
        self._app, self._folder, self._count, self._began = app, folder, 0, time.time_ns()
        folder.mkdir(parents=True, exist_ok=True)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = re.sub(r"^/s/[^/]+", "", scope.get("path", ""))
        if scope["type"] != "http" or not (path in PATHS or GOOGLES.match(path)):
            await self._app(scope, receive, send)
            return
        path += STREAMED if path.endswith(":streamGenerateContent") else ""
        sent, answered = bytearray(), {}

        async def hear() -> Any:
            message = await receive()
            sent.extend(message.get("body", b""))
            return message

        async def tell(message: Any) -> None:
            if message["type"] == "http.response.start":
                answered.update(message)
            await send(message)

        await self._app(scope, hear, tell)
        if answered.get("status") == 200:
            self._keep(scope, path, bytes(sent), dict(answered["headers"]))

    def _keep(self, scope: Any, path: str, sent: bytes, answered: dict[bytes, bytes]) -> None:
        body = json.loads(sent)
        client, version = client_of({name.decode(): value.decode("latin-1") for name, value in scope["headers"]})
        ignored = answered.get(b"x-midflight-ignored", b"").decode()
        self._count += 1
        one = Recorded(client, version, path, features(body, path), ignored, scrubbed(body))
        (self._folder / f"{self._began}-{self._count:05d}.json").write_text(json.dumps(asdict(one)))


def recording(app: Any) -> Any:
    """The application, with a recorder before it where the environment asks for one."""
    folder = os.environ.get("MIDFLIGHT_RECORD")
    return app if folder is None else Recorder(app, Path(folder))


def read(folder: Path = BODIES) -> Iterator[Recorded]:
    for path in sorted(folder.glob("*.json")):
        yield from (Recorded(**one) for one in json.loads(path.read_text()))


def gather(folder: Path) -> None:
    """What was recorded there, of each client one body for each route and set of features, in the place of what was known of it.

    `versions.json` there has versions by name, for clients that do not say theirs."""
    versions: dict[str, str] = {}
    for path in folder.glob("versions*.json"):
        versions |= json.loads(path.read_text())
    found: dict[str, dict[tuple[str, str], Recorded]] = {}
    for path in sorted(folder.glob("[0-9]*.json")):
        one = Recorded(**json.loads(path.read_text()))
        if one.client != "unknown" and not refers_to_what_is_stored(one.body):
            whole = Recorded(one.client, one.version or versions.get(one.client, ""), one.path, one.features, one.ignored, one.body)
            found.setdefault(one.client, {}).setdefault((one.path, one.features), whole)
    for client, bodies in found.items():
        (BODIES / f"{client.lower()}.json").write_text(json.dumps([asdict(one) for one in bodies.values()], indent=1) + "\n")


if __name__ == "__main__":
    gather(Path(sys.argv[1]))
