"""The options of the gateway."""

import re
from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from midflight.config.section import (
    NonNegative,
    Patience,
    Port,
    Positive,
    Seconds,
    Section,
    is_address,
)

_HOST = re.compile(r"[\w.:%-]+")
_NAME = re.compile(r"\*|[\w.-]+|[\da-fA-F:]+")
"""A name of a host, an address of it, or `*`."""


class GatewaySection(Section):
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback exposes the endpoint."""
    port: Port = 0
    """0 takes a free port."""
    public_url: str = ""
    """Address for agents on other machines, such as `https://proxy.example`. Empty: that of the
    connection.
    """
    private_metrics: bool = False
    """`/metrics` asks for the control token."""
    strict: bool = False
    """Refuse fields that cannot change the text (else `x-midflight-ignored`), and limits above the
    room (else lowered).
    """
    sampling: Literal["request", "run"] = "request"
    """Whose sampling counts in trained sessions: the request's, or the run's
    (docs/gateway.md#sampling-in-every-dialect).
    """
    request_seconds: Patience = 120.0
    """How long an answer that an engine serves may go without a token."""
    max_sessions: Positive = 10_000
    """Live sessions, and requests under way; further ones get 429."""
    drain_seconds: NonNegative = 20.0
    """Time for a leaving engine to finish its requests; the rest goes elsewhere."""
    tool_format: Literal["auto", "none", "hermes", "llama3", "mistral", "qwen_coder"] = "auto"
    """How the model writes tool calls (docs/tools.md#formats); `none` reads only forced calls."""
    reasoning_format: Literal["auto", "none", "think", "mistral"] = "auto"
    """The markers of thinking (docs/tools.md#formats); `none` leaves it in the content."""
    shards: Positive = 1
    """Rollout processes, each with gateway, agents and store; more serve more requests."""
    session_seconds: Seconds = 3600.0
    """Time without a request after which a session over HTTP ends; its record stays as long."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the endpoint answers to, beside those of loopback."""
        public = urlsplit(self.public_url).hostname
        return (public,) if public else ()


def gateway_contradictions(gateway: GatewaySection, *, view_port: int) -> Iterator[str]:
    """`view_port` is that of the viewer."""
    g = gateway
    if not _HOST.fullmatch(g.host):
        yield (
            f"gateway.host is {g.host!r}; give 127.0.0.1 for this machine alone, or 0.0.0.0 for "
            "all networks"
        )
    if g.public_url and not is_address(g.public_url):
        yield (
            "gateway.public_url must be the beginning of an address, such as "
            f"https://proxy.example, got {g.public_url!r}"
        )
    if g.port and g.port == view_port:
        yield (
            f"observe.view_port and gateway.port are both {g.port}; give one of them another port, "
            "or 0 for a free one"
        )
