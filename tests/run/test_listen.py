"""The sockets that the launcher opens for its parts."""

from __future__ import annotations

import socket

from midflight.wire.server import listen


def test_what_is_accepted_sends_at_once() -> None:
    """Else a short answer in two writes waits for the acknowledgement of the first: 40 ms for each control call."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
