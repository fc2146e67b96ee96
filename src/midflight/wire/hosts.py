"""The names that a server answers to, and whether other machines can reach its address."""

import ipaddress
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from midflight.wire.edge import headers_of, plain_fault, send_fault


class OnlyHosts:
    """An application for requests that call it by an address of loopback or one of `names`.

    A web page may make its own name lead here (DNS rebinding), and then its visitors' browsers ask
    by that name.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._names = frozenset(name.lower() for name in names)
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = headers_of(scope).get(b"host", b"").decode("latin-1").lower()
        name = _name_of(host)
        if not host or name in self._names or is_loopback(name):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            message = (
                f"this server does not answer for the host {name[:80]!r}: ask 127.0.0.1 or "
                "localhost, or set gateway.public_url to an address of that name."
            )
            await send_fault(send, plain_fault(421, message, "unknown_host"))


def guarded(app: ASGIApp, *, host: str, names: Collection[str]) -> ASGIApp:
    """The application as it may listen on `host`. If `host` is loopback, it answers to the names of
    loopback and to `names`. Elsewhere it answers to any name.
    """
    if not is_loopback(host):
        return app
    return OnlyHosts(app, names)


def _name_of(host: str) -> str:
    """The host without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def is_loopback(host: str) -> bool:
    """True if only this machine reaches the address. A name other than `localhost` counts as
    reached by others.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def exposure(host: str, *, anonymous: bool) -> str | None:
    """A warning about the exposure of a server that listens there. `None` on loopback. With
    `anonymous` requests without a session are answered.
    """
    if is_loopback(host):
        return None
    if anonymous:
        generation = "generation for everybody, without a token"
    else:
        generation = "generation for whoever holds a session's address"
    return (
        f"warning: {host} can be reached from other machines, and there is no TLS. Exposed are "
        f"{generation}; /health and, unless gateway.private_metrics, /metrics for everybody; the "
        "control plane and /midflight/v1 for whoever holds the control token. Listen on 127.0.0.1 "
        "behind a proxy, or keep the network private."
    )


def is_every_address(host: str) -> bool:
    """True if it stands for all addresses of whatever machine listens there, as 0.0.0.0 does."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
