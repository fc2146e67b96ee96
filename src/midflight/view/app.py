"""The viewer as an application: its addresses, the frame round every page, and the pages of
errors.
"""

import inspect
import logging
import socket
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from html import escape
from urllib.parse import quote

import uvicorn
from fastapi import FastAPI
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from nicegui import app as served
from nicegui import ui
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from midflight.archive.runs import ArchivedRun
from midflight.errors import MidflightError, NoRun
from midflight.view import widgets
from midflight.view.guard import TokenGuard
from midflight.view.pages import conversation, groups, ledger, overview, run, time
from midflight.view.visit import PageRequest, RunFolders
from midflight.wire.hosts import guarded, is_loopback

LOOKS = {"auto": None, "light": False, "dark": True}
LOOKS_COOKIE = "midflight_looks"
PATIENCE_SECONDS = 120.0
"""The seconds that a page may take to be drawn. For a long run on a busy machine it takes longer
than NiceGUI's three seconds.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a run: its part of the address, its word in the menu, and the function that draws
    the page.
    """

    name: str
    title: str
    draw: Callable[[PageRequest], Awaitable[None] | None]
    in_menu: bool = True


PAGES = (
    Page("run", "Run", run.draw),
    Page("time", "Time", time.draw),
    Page("groups", "Groups", groups.draw),
    Page("conversation", "Conversation", conversation.draw, in_menu=False),
    Page("ledger", "Ledger", ledger.draw),
)


def build(
    shelf: RunFolders, *, host: str, names: Collection[str] = (), token: str | None = None
) -> FastAPI:
    """The application. With a token it shows nothing to requests that do not bring it. On loopback
    it answers to the names of loopback and `names`.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.get("/looks/{look}")(_choose_look)
    app.get("/health")(lambda: {"status": "ok"})
    pages = {page.name: page for page in PAGES}

    @ui.page("/", response_timeout=PATIENCE_SECONDS)
    async def first(request: Request) -> None:
        async def draw() -> None:
            runs = shelf.runs()
            if len(runs) == 1:
                visit = PageRequest(runs[0], runs, dict(request.query_params))
                await _page(pages["run"], visit, request)
            else:
                with _frame(None, runs, "Runs", request):
                    overview.draw(runs)

        await _told(draw, request)

    @ui.page("/run/{slug}/{page}", response_timeout=PATIENCE_SECONDS)
    async def of_run(slug: str, page: str, request: Request) -> None:
        async def draw() -> None:
            chosen = shelf.run(slug)
            if page not in pages:
                ui.context.client.status_code = 404
                raise MidflightError(f"there is no page {page!r}; there are {', '.join(pages)}.")
            visit = PageRequest(chosen, shelf.runs(), dict(request.query_params))
            await _page(pages[page], visit, request)

        await _told(draw, request)

    served.exception_handler(404)(_unknown)
    # Compressing what a browser of this machine loads takes longer than loading it, and Tailwind's
    # compiler of styles is not used.
    compressing = None if is_loopback(host) else GZipMiddleware
    ui.run_with(
        app,
        title="Midflight",
        show_welcome_message=False,
        reconnect_timeout=10.0,
        language="en-US",
        tailwind=False,
        gzip_middleware_factory=compressing,
    )
    if token is not None:
        app.add_middleware(TokenGuard, token=token)
    app.add_middleware(_Hosts, host=host, names=names)
    return app


def _choose_look(look: str, to: str = "/") -> Response:
    """Remembers a look, and leads back to the page on which it was chosen, on this host."""
    there = RedirectResponse("/" + to.lstrip("/\\"), status_code=303)
    if look in LOOKS:
        there.set_cookie(LOOKS_COOKIE, look, samesite="lax", max_age=31_536_000)
    return there


class _Hosts:
    """`wire.server.guarded` in the form that FastAPI takes."""

    def __init__(self, app: ASGIApp, *, host: str, names: Collection[str]) -> None:
        self._guarded = guarded(app, host=host, names=names)
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app if scope["type"] == "lifespan" else self._guarded
        await app(scope, receive, send)


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Serves until a signal ends it."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listener])


async def _told(draw: Callable[[], Awaitable[None]], request: Request) -> None:
    """Draws a page. An error that is meant for people becomes the page."""
    try:
        await draw()
    except NoRun as error:
        ui.context.client.status_code = 404
        _problem("This can't be shown", str(error), request)
    except MidflightError as error:
        _problem("This can't be shown", str(error), request)
    except Exception as error:
        _log.exception("drawing %s", request.url.path)
        _problem(
            "This page failed",
            f"{type(error).__name__}: {error}. The viewer's log has its traceback; the run is "
            "not touched.",
            request,
        )
    ui.add_body_html(widgets.at_first(ui.context.client.content, look=_look(request)))


async def _unknown(request: Request, _: Exception) -> Response:
    """The answer to an address that no page has: it leads to the runs. It needs no program."""
    if "text/html" not in request.headers.get("accept", ""):
        return Response("there is nothing at this address", 404, media_type="text/plain")
    look = _look(request)
    return HTMLResponse(
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1"><title>No such page · Midflight</title>'
        f"<style>{widgets.STYLE}</style>"
        f'<div id="app"><div class="shown {look}"><nav class="bar"><a href="/">Midflight</a></nav>'
        '<div class="page"><h1>There is no such page</h1><p class="trouble" role="alert" '
        f'data-test="problem">Nothing is at {escape(request.url.path)}.</p>'
        '<a href="/" data-test="home">All runs</a></div></div></div></html>',
        status_code=404,
    )


def _look(request: Request) -> str:
    look = request.cookies.get(LOOKS_COOKIE, "auto")
    return look if look in LOOKS else "auto"


async def _page(page: Page, visit: PageRequest, request: Request) -> None:
    visit.run.journal()  # a run that is gone then gives the same error on every page
    with _frame(visit, visit.runs, page.title, request):
        drawn = page.draw(visit)
        if inspect.isawaitable(drawn):
            await drawn


def _problem(title: str, text: str, request: Request) -> None:
    ui.context.client.content.clear()
    with _frame(None, (), title, request):
        problem = ui.label(text).props('role="alert" data-test="problem"')
        problem.classes("trouble").style("white-space: pre-line")
        ui.link("All runs", "/").props('data-test="home"')


def _frame(
    visit: PageRequest | None, runs: tuple[ArchivedRun, ...], title: str, request: Request
) -> ui.element:
    """Draws head and menu. The page is drawn inside the element that it returns."""
    look = _look(request)
    ui.dark_mode(LOOKS[look])
    ui.add_head_html(f"<style>{widgets.STYLE}</style>")
    ui.page_title(f"{title} · {visit.run.slug} · Midflight" if visit else f"{title} · Midflight")
    here = request.url.path
    if request.url.query:
        here += f"?{request.url.query}"
    with ui.element("nav").classes("bar").props('aria-label="Pages"'):
        ui.link("Midflight", "/")
        if visit is not None:
            _menu(visit, title)
            _choice(visit, title)
        ui.element("span").classes("space")
        with ui.element("span").classes("seg"):
            for name in LOOKS:
                link = ui.link(name, f"/looks/{name}?to={quote(here)}")
                link.props(f'data-test="look {name}"')
                if name == look:
                    link.classes("here").props('aria-current="true"')
    main = ui.element("div").classes("page column")
    with main, ui.element("div").classes("head"), ui.element("h1"):
        if visit is None:
            ui.label(title)
        else:
            ui.html(
                f'{escape(visit.run.slug)} <span class="where">{escape(title)}</span>',
                sanitize=False,
            )
    return main


def _menu(visit: PageRequest, title: str) -> None:
    with ui.element("span").classes("tabs"):
        for page in PAGES:
            if page.in_menu:
                link = ui.link(page.title, visit.link(page.name))
                link.props(f'data-test="menu {page.name}"')
                if page.title == title:
                    link.classes("here").props('aria-current="page"')


def _choice(visit: PageRequest, title: str) -> None:
    """Links to the same page of the other runs."""
    page = next(page.name for page in PAGES if page.title == title)
    others = [other for other in visit.runs if other.slug != visit.run.slug]
    if others:
        with ui.element("details"):
            with ui.element("summary").props('data-test="other runs"'):
                number = "1 other run" if len(others) == 1 else f"{len(others)} other runs"
                ui.label(number).style("display: inline")
            for other in others:
                ui.link(other.slug, visit.link(page, of=other)).style("display: block")
