"""One address for several gateways, by the real nginx: whose request it is, and what a client hears while its gateway is away."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import httpx2
import pytest

from .nginx import MISSING, NGINX, addresses, one_address, write_addresses

pytestmark = pytest.mark.skipif(NGINX is None, reason=MISSING)
SESSION = "mf-s1-0-12-0-3-7.secret"


class Gateway(ThreadingHTTPServer):
    """Says what it was asked, with its own number. A path that ends in `/stream` gets a second part when `more` is set."""

    def __init__(self, number: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.number, self.more = number, Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        gateway = self.server
        assert isinstance(gateway, Gateway)
        body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
        said = {"gateway": gateway.number, "asked": f"{self.command} {self.path}", "body": body, "host": self.headers["host"]}
        data = json.dumps(said).encode()
        self.send_response(418)
        if not self.path.endswith("/stream"):
            self.send_header("content-length", str(len(data)))
            self.send_header("x-own", "1")
            self.end_headers()
            self.wfile.write(data)
            return
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\nfirst\r\n")
        self.wfile.flush()
        assert gateway.more.wait(20)
        self.wfile.write(b"6\r\nsecond\r\n0\r\n\r\n")

    do_GET = do_POST = do_PUT = answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def gateways(number: int) -> Generator[list[Gateway]]:
    made = [Gateway(index) for index in range(number)]
    threads = [Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True) for one in made]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        for one in made:
            one.more.set()
            one.shutdown()
            one.server_close()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[list[Gateway], httpx2.Client]]:
    folder = tmp_path_factory.mktemp("two")
    with gateways(2) as made:
        write_addresses(folder / "run", [one.url for one in made])
        with one_address(folder / "run", folder / "nginx") as url, httpx2.Client(base_url=url, timeout=20) as http:
            yield made, http


@pytest.mark.parametrize(
    ("path", "headers", "shard"),
    [
        (f"/s/{SESSION}/v1/chat/completions", {}, 1),
        ("/v1/chat/completions", {"authorization": f"Bearer {SESSION}"}, 1),
        ("/v1/chat/completions", {"authorization": f"bearer {SESSION}"}, 1),
        ("/v1/messages", {"x-api-key": SESSION}, 1),
        ("/v1/messages", {"x-midflight-session": SESSION, "authorization": "Bearer mf-s0-0-12-0-3-7.secret"}, 1),
        ("/v1/chat/completions", {"authorization": "Bearer mf-s0-0-12-0-3-7.secret"}, 0),
        ("/midflight/v1/sessions/mf-s1-0-12-0-3-7/reward", {"authorization": "Bearer control"}, 1),
        (f"/s/mf-s0-0-1-0-0-1.x/v1/{SESSION}", {"authorization": f"Bearer {SESSION}"}, 0),
        ("/s/mf-s2-0-12-0-3-7.secret/v1/models", {}, 0),
        ("/metrics", {}, 0),
        ("/v1beta/models/policy:generateContent", {"x-goog-api-key": SESSION}, 1),
        (f"/v1beta/models/policy:generateContent?key={SESSION}", {}, 1),
        ("/v1/chat/completions", {"authorization": "Bearer none"}, 0),
        ("/v1/chat/completions", {"authorization": "Bearer sk-mf-s1-0"}, 0),
    ],
)
def test_a_request_goes_to_the_gateway_whose_session_it_names_and_any_other_to_the_first(
    two: tuple[list[Gateway], httpx2.Client], path: str, headers: dict[str, str], shard: int
) -> None:
    _, http = two
    assert http.post(path, headers=headers).json()["gateway"] == shard


def test_sessions_are_opened_at_each_gateway_in_turn(two: tuple[list[Gateway], httpx2.Client]) -> None:
    _, http = two
    opened = [http.post("/midflight/v1/sessions").json()["gateway"] for _ in range(4)]
    assert opened in ([0, 1, 0, 1], [1, 0, 1, 0])
    assert {http.get("/midflight/v1/sessions").json()["gateway"] for _ in range(3)} == {0}


def test_a_request_and_its_answer_come_through_as_they_are(two: tuple[list[Gateway], httpx2.Client]) -> None:
    _, http = two
    answer = http.put(f"/s/{SESSION}/v1/a%2Fb?a=%20b", content=b"x" * 3_000_000)
    assert (answer.status_code, answer.headers["x-own"]) == (418, "1")
    said = answer.json()
    assert said["asked"] == f"PUT /s/{SESSION}/v1/a%2Fb?a=%20b" and len(said["body"]) == 3_000_000
    assert said["host"] == str(http.base_url).removeprefix("http://").rstrip("/"), "the gateway guards the names that it answers to"


def test_each_part_of_a_stream_comes_when_it_is_made(two: tuple[list[Gateway], httpx2.Client]) -> None:
    made, http = two
    with http.stream("POST", f"/s/{SESSION}/v1/stream") as answer:
        parts = answer.iter_raw()
        assert next(parts) == b"first", "before the second part is made"
        made[1].more.set()
        assert b"".join(parts) == b"second"


def test_of_a_gateway_that_is_away_a_client_hears_that_asking_again_helps_and_others_hear_nothing(tmp_path: Path) -> None:
    with gateways(2) as made:
        write_addresses(tmp_path / "run", [made[0].url, "http://127.0.0.1:9"])
        with one_address(tmp_path / "run", tmp_path / "nginx") as url, httpx2.Client(base_url=url, timeout=20) as http:
            answer = http.post(f"/s/{SESSION}/v1/chat/completions", json={})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            error = answer.json()["error"]
            assert (error["code"], "ask again in a moment" in error["message"]) == ("engine_unavailable", True)
            assert http.post("/s/mf-s0-1.x/v1/chat/completions").json()["gateway"] == 0
            opened = {http.post("/midflight/v1/sessions").json()["gateway"] for _ in range(4)}
            assert opened == {0}, "a session is opened where there is a gateway"


def test_a_run_that_does_not_go_on_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    found = addresses(tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith(f"{tmp_path}/endpoint.json is not there") and "give the folder of a run that goes on" in found.stderr
    write_addresses(tmp_path, ["http://10.0.0.1:8000", "http://10.0.0.2:41001", "http://10.0.0.3:41001"])
    said = addresses(tmp_path).stdout
    assert "a-token-of-a-test" not in said and "server 10.0.0.3:41001 max_fails=0;" in said and "2 midflight_gateway_2;" in said
