"""`GET /dashboard`: leads to the viewer beside the run, or explains how to get one."""

from pathlib import Path
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

VIEWER = "view.json"
"""The file in a run's folder with the address of its viewer, while there is one."""

_NONE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Midflight</title>
<style>body{font:16px sans-serif;max-width:40rem;margin:4rem auto;padding:0 1rem;color-scheme:light dark}</style>
<h1>There is no viewer beside this run</h1><p>Install it where the run is started, and start the run again; <code>[observe] view</code> must be
<code>"auto"</code>:</p><pre>pip install 'midflight[view]'</pre><p>Or look at the run's folder, now or later, from anywhere it can be read:</p>
<pre>midflight view RUN</pre></html>"""


class ViewerAddress(msgspec.Struct, frozen=True):
    """The address of a viewer."""

    url: str


def dashboard_route(folder: Path) -> BaseRoute:
    """The redirect keeps the token of a request. The viewer checks it, and asks for it if there is
    none.
    """

    async def dashboard(request: Request) -> Response:
        try:
            there = msgspec.json.decode((folder / VIEWER).read_bytes(), type=ViewerAddress).url
        except (OSError, msgspec.DecodeError):
            return HTMLResponse(_NONE, status_code=404)
        token = request.query_params.get("token") or _bearer(request)
        query = f"?{urlencode({'token': token})}" if token else ""
        return RedirectResponse(f"{there}/{query}", status_code=307)

    return Route("/dashboard", dashboard, methods=["GET"])


def _bearer(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token if kind.lower() == "bearer" else ""
