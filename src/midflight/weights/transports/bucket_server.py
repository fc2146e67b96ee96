"""The HTTP server that gives buckets away. A trainer's rank runs one for the others, and so does
every machine that has some of a version already.

| `GET /SECRET/FINGERPRINT/...` | answer |
|---|---|
| `tree` | all leaves with their hashes |
| `held` | the numbers of the buckets that are here, and other sources that have some; a receiver that asks may say where it gives buckets away itself |
| a number | the leaves of that bucket, one after the other |

404 means that it is not here (yet), 503 that too many ask. All of it runs in threads, which mostly
wait for the network with the interpreter lock released, and nothing of it is on the event loop that
decodes.

| wait | waits for | ended by |
|---|---|---|
| a connection's next question | the client | the client, or `IDLE_SECONDS` |
| an answer's bytes | the client, which takes them | the client, or `IDLE_SECONDS` for each leaf |
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
"""The header in which a receiver names the address where it gives its buckets away."""
IDLE_SECONDS = 60.0
QUIET_SECONDS = 3600.0
"""After so long without a connection the server's loop wakes up, and finds nothing to do."""
MAX_CLIENTS = 1024
"""The limit of connections at once. Each is a thread, which mostly waits."""
MAX_SENDING = 16
"""The limit of buckets on their way at once."""
TURN_SECONDS = 0.2
"""The time that a question waits for its turn. A receiver that is refused has other
sources to ask.
"""
MAX_TOLD = 8
"""The number of sources that an answer names, drawn anew for each. It is large enough that all
receivers find all sources in time, and small enough that a thousand do not ask a thousand.
"""
MAX_HEARD = 4096
"""The number of sources that are remembered for a version."""


class BucketInventory(msgspec.Struct, frozen=True):
    """A source's answer about its buckets of a version."""

    bits: bytes
    """Bit i says whether bucket i is here."""
    sources: tuple[str, ...]
    """Other sources that have some buckets."""

    def numbers(self) -> tuple[int, ...]:
        """The numbers of the buckets that are here."""
        found: list[int] = []
        for at, byte in enumerate(self.bits):
            for bit in range(8):
                if byte >> bit & 1:
                    found.append(8 * at + bit)
        return tuple(found)


@dataclass(slots=True)
class SharedVersion:
    """A version, or the buckets of it that are here. `held` grows while receivers ask."""

    tree: Tree
    views: Sequence[Views | None]
    """The views of each bucket. `None` if another owner has it."""
    held: set[int]
    heard: dict[str, None] = field(default_factory=dict[str, None])
    """Other sources that have some buckets."""

    def hear_of(self, source: str) -> None:
        """Takes note of another source."""
        if len(self.heard) < MAX_HEARD:
            self.heard[source] = None

    def told(self) -> BucketInventory:
        """The answer to a receiver that asks which buckets are here."""
        known = tuple(self.heard)
        drawn = random.sample(known, min(MAX_TOLD, len(known)))
        bits = bytearray(-(-len(self.tree) // 8))
        for number in tuple(self.held):
            bits[number // 8] |= 1 << number % 8
        return BucketInventory(bytes(bits), tuple(drawn))


class BucketServer(ThreadingHTTPServer):
    """Listens on one address of this machine, on a free port. It serves in threads from its making
    to `close`. Nothing is encrypted.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, *, secret: str) -> None:
        if ":" in host:
            self.address_family = AF_INET6
        super().__init__((host, 0), _BucketHandler)
        self.secret = secret
        self.shares: dict[str, SharedVersion] = {}
        """The versions that are shared, by fingerprint. Threads read it while its owner
        changes it.
        """
        self.num_bytes = 0
        """The number of bytes that were given away so far."""
        self._counting = threading.Lock()
        self._room = threading.BoundedSemaphore(MAX_CLIENTS)
        self.sending = threading.BoundedSemaphore(MAX_SENDING)
        named = f"[{host}]" if ":" in host else host
        self.url = f"http://{named}:{self.server_address[1]}/{secret}"
        thread = threading.Thread(
            target=self.serve_forever, args=(QUIET_SECONDS,), name="weights-buckets", daemon=True
        )
        thread.start()

    def count(self, num_bytes: int) -> None:
        with self._counting:
            self.num_bytes += num_bytes

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in a thread of its own, while there are not too many."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Does nothing: a client that is gone asks again, or asks another source."""

    def close(self) -> None:
        """Listens no more, and forgets all versions. Idempotent. Answers under way end with their
        leaf.
        """
        self.shares.clear()
        with suppress(OSError):
            self.socket.shutdown(SHUT_RDWR)  # this wakes the thread that listens
        self.shutdown()
        self.server_close()


class _BucketHandler(BaseHTTPRequestHandler):
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
        else:
            self._give(server, _bucket_of(share, wanted))

    def _give(self, server: BucketServer, views: Views | None) -> None:
        if views is None:
            self._answer(404)
            return
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
        """Does nothing, because paths hold the secret."""


def _bucket_of(share: SharedVersion, number: str) -> Views | None:
    """The leaves of the bucket of this number. `None` if it is not here, or not a number."""
    if not number.isdecimal() or len(number) >= 12:
        return None
    if int(number) not in share.held:
        return None
    return share.views[int(number)]
