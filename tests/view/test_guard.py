"""Who may look at a viewer that asks for a token, and where its answers lead."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from midflight.view.guard import COOKIE, TokenGuard


async def _page(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"seen {request.url.query}")


async def _socket(socket: WebSocket) -> None:
    await socket.accept()
    await socket.close()


@pytest.fixture
def client() -> TestClient:
    app = Starlette(routes=[WebSocketRoute("/socket", _socket), Route("/{path:path}", _page)])
    return TestClient(TokenGuard(app, token="secret"), follow_redirects=False)


def test_without_the_token_nothing_is_shown(client: TestClient) -> None:
    assert client.get("/run").status_code == client.get("/run?token=other").status_code == 401
    assert client.get("/run", headers={"cookie": f"{COOKIE}=other"}).status_code == 401
    assert "asks for its token" in client.get("/run", headers={"accept": "text/html"}).text
    with pytest.raises(WebSocketDisconnect) as closed, client.websocket_connect("/socket"):
        pass
    assert closed.value.code == 1008


def test_the_token_of_an_address_becomes_a_cookie_and_leaves_the_address(client: TestClient) -> None:
    answer = client.get("/run?token=secret&step=7")
    assert (answer.status_code, answer.headers["location"]) == (303, "/run?step=7")
    assert "httponly" in answer.headers["set-cookie"].lower() and COOKIE in client.cookies
    assert client.get("/run?step=7").text == "seen step=7"
    with client.websocket_connect("/socket"):
        pass


def test_a_bearer_is_let_through(client: TestClient) -> None:
    assert client.get("/run", headers={"authorization": "Bearer secret"}).status_code == 200


@pytest.mark.parametrize("path", ["//elsewhere.example/", "/%5Celsewhere.example/"])
def test_no_address_leads_to_another_host(client: TestClient, path: str) -> None:
    to = client.get(f"http://testserver{path}?token=secret").headers["location"]
    assert to.startswith("/") and not to.startswith(("//", "/\\"))
