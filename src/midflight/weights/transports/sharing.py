"""Giving buckets away over HTTP: what a trainer's rank, and every machine that has some of a
version already, does for the others.

| `GET /SECRET/FINGERPRINT/...` | answer |
|---|---|
| `tree` | all leaves with their hashes |
| `held` | the numbers of the buckets that are here, and others who have some; whoever asks may say where it gives them away itself |
| a number | the leaves of that bucket, one after the other |

404: not here (yet). 503: too many ask. In threads, since what they do is to wait for the network
with the interpreter lock released: nothing of it is on the event loop that decodes.

| wait | waits for | ended by |
|---|---|---|
| a connection's next question | the client | the client, or `IDLE_SECONDS` |
| an answer's bytes | the client, who takes them | the client, or `IDLE_SECONDS` for each leaf |
"""

import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, SHUT_RDWR
from typing import Any, cast

import msgspec

from midflight.weights.transports.swarm import Tree, Views, sources_in
from midflight.wire.edge import same_token

FROM = "X-Midflight-Source"
"""The header by which a receiver says where it gives away what it has."""
IDLE_SECONDS = 60.0
QUIET_SECONDS = 3600.0
"""After which a server that nobody asks anything looks round in vain."""
MAX_CLIENTS = 1024
"""Connections at once; each is a thread, which mostly waits."""
MAX_SENDING = 16
TURN_SECONDS = 0.2
"""Buckets on their way at once, and seconds that a question waits for its turn. A receiver that is
refused has others to ask.
"""
MAX_TOLD = 8
"""Sources named in an answer, drawn anew for each: enough that all find all by and by, few enough
that a thousand do not ask a thousand.
"""
MAX_HEARD = 4096
"""Sources remembered for a version."""


class Held(msgspec.Struct, frozen=True):
    """What a source says of itself."""

    bits: bytes
    """Bit i: whether bucket i is here."""
    sources: tuple[str, ...]
    """Others who have some."""

    def numbers(self) -> tuple[int, ...]:
        return tuple(
            8 * at + bit for at, byte in enumerate(self.bits) for bit in range(8) if byte >> bit & 1
        )


@dataclass(slots=True)
class SharedVersion:
    """A version, or what of it is here. `held` grows while others ask."""

    tree: Tree
    views: Sequence[Views | None]
    """Of each bucket; none where another owner has it."""
    held: set[int]
    heard: dict[str, None] = field(default_factory=dict[str, None])
    """Who has some of it too."""

    def hear_of(self, source: str) -> None:
        if len(self.heard) < MAX_HEARD:
            self.heard[source] = None

    def told(self) -> Held:
        known = tuple(self.heard)
        bits = bytearray(-(-len(self.tree) // 8))
        for number in tuple(self.held):
            bits[number // 8] |= 1 << number % 8
        return Held(bytes(bits), tuple(random.sample(known, min(MAX_TOLD, len(known)))))


class BucketServer(ThreadingHTTPServer):
    """Listens on one address of this machine, on a free port. Serves in threads from its making to
    `close`. Nothing is encrypted.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, *, secret: str) -> None:
        if ":" in host:
            self.address_family = AF_INET6
        super().__init__((host, 0), _Giver)
        self.secret = secret
        self.shares: dict[str, SharedVersion] = {}
        """By fingerprint. Threads read it while its owner changes it."""
        self.num_bytes = 0
        """Given away so far."""
        self._counting = threading.Lock()
        self._room = threading.BoundedSemaphore(MAX_CLIENTS)
        self.sending = threading.BoundedSemaphore(MAX_SENDING)
        named = f"[{host}]" if ":" in host else host
        self.url = f"http://{named}:{self.server_address[1]}/{secret}"
        threading.Thread(
            target=self.serve_forever, args=(QUIET_SECONDS,), name="weights-buckets", daemon=True
        ).start()

    def count(self, num_bytes: int) -> None:
        with self._counting:
            self.num_bytes += num_bytes

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, while there are not too many."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            with suppress(OSError):
                request.sendall(
                    b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone: it asks again, or another."""

    def close(self) -> None:
        """Listens no more, and knows no version. Idempotent. Answers under way end with their
        leaf.
        """
        self.shares.clear()
        with suppress(OSError):
            self.socket.shutdown(SHUT_RDWR)  # which wakes whoever listens
        self.shutdown()
        self.server_close()


class _Giver(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        server = cast(BucketServer, self.server)
        secret, _, rest = self.path.removeprefix("/").partition("/")
        fingerprint, _, wanted = rest.partition("/")
        share = server.shares.get(fingerprint) if same_token(secret, server.secret) else None
        if share is None:
            self._answer(404)
        elif wanted == "tree":
            self._answer(200, memoryview(msgspec.json.encode(share.tree)))
        elif wanted == "held":
            with suppress(ValueError):
                for source in sources_in(self.headers.get(FROM, "")):
                    share.hear_of(source)
            self._answer(200, memoryview(msgspec.json.encode(share.told())))
        elif (
            wanted.isdecimal()
            and len(wanted) < 12
            and int(wanted) in share.held
            and (views := share.views[int(wanted)]) is not None
        ):
            self._give(server, views)
        else:
            self._answer(404)

    def _give(self, server: BucketServer, views: Views) -> None:
        if not server.sending.acquire(timeout=TURN_SECONDS):
            self._answer(503)
            return
        try:
            server.count(sum(map(len, views)))
            self._answer(200, *views)
        finally:
            server.sending.release()

    def _answer(self, status: int, *parts: memoryview) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(sum(map(len, parts))))
        self.end_headers()
        for part in parts:
            self.connection.sendall(part)

    def log_message(self, format: str, *args: object) -> None:
        """Paths hold the secret."""
