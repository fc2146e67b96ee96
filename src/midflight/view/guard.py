"""Shows pages only to browsers with the token, if there is one. The token comes in the address
once, and in a cookie from then on.
"""

import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

COOKIE = "midflight_view"

_ASKS = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Midflight</title><style>
:root { color-scheme: light dark; --paper: #f6f7f8; --ink: #14181d; --note: #57606b; --line: #dfe3e8; --accent: #1b5fab; }
@media (prefers-color-scheme: dark) { :root { --paper: #0f1215; --ink: #e6e9ed; --note: #9ba6b2; --line: #2b323a; --accent: #7db8f7; } }
body { font: .875rem/1.45 system-ui, sans-serif; max-width: 34rem; margin: 15vh auto; padding: 0 16px; background: var(--paper); color: var(--ink); }
h1 { font-size: 1.375rem; } p { color: var(--note); }
input, button { font: inherit; padding: 6px 10px; border: 1px solid var(--line); border-radius: 6px; } button { color: var(--accent); font-weight: 600; }
</style>
<h1>This viewer asks for its token</h1>
<p>It was printed where the viewer was started. The token of a running run is in <code>endpoint.json</code> in the run's folder.</p>
<form><label>Token <input name="token" type="password" autofocus></label> <button>Look</button></form></html>"""


class TokenGuard:
    """Passes on requests that bring the token in a cookie or as a bearer token. A request with
    `?token=` gets that cookie in its answer. Any other request gets a form.
    """

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        asked = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in asked if name == "token"), None)
        if given is not None and scope["type"] == "http":
            response = RedirectResponse(_without(scope["path"], asked), status_code=303)
            if self._is_right(given):
                response.set_cookie(COOKIE, given, httponly=True, samesite="lax")
            else:
                response = HTMLResponse(_ASKS, status_code=401)
            return await response(scope, receive, send)
        if self._is_right(_brought(Headers(scope=scope))):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        is_page = "text/html" in Headers(scope=scope).get("accept", "")
        if is_page:
            refusal = HTMLResponse(_ASKS, status_code=401)
        else:
            refusal = PlainTextResponse("this viewer asks for its token", status_code=401)
        return await refusal(scope, receive, send)

    def _is_right(self, given: str | None) -> bool:
        return given is not None and secrets.compare_digest(given.encode(), self._token.encode())


def _brought(headers: Headers) -> str | None:
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return bearer
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if cookie is None else cookie.value


def _without(path: str, asked: list[tuple[str, str]]) -> str:
    """The same address without the token. It begins with one slash, because two would name another
    host.
    """
    address = "/" + path.lstrip("/")
    left = urlencode([(name, value) for name, value in asked if name != "token"])
    return f"{address}?{left}" if left else address
