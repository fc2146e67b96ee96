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
    """The beginning of the addresses of sessions given over HTTP, and of `client.public_url`, for
    agents on other machines, such as `https://proxy.example`. Empty: the address of the connection
    that asked.
    """
    private_metrics: bool = False
    """`/metrics` asks for the control token."""
    strict: bool = False
    """Refuse by name fields that have no effect on the text, and limits above the room there is.
    Else such a field is ignored (`x-midflight-ignored`), and such a limit is lowered
    (`x-midflight-clamped`).
    """
    sampling: Literal["request", "run"] = "request"
    """Whose sampling counts in sessions that are trained. `request`: that of each request; a turn
    sampled otherwise than the policy is masked (`x-midflight-masked`). `run`: that of
    `environment.temperature` and its like; the head names what was replaced
    (`x-midflight-replaced`).
    """
    request_seconds: Patience = 120.0
    """How long an answer may go without a new token on an engine that serves it. A session's
    generation survives the loss of its client for a fourth of that.
    """
    max_sessions: Positive = 10_000
    """Live sessions, and requests under way; further ones are answered 429."""
    drain_seconds: NonNegative = 20.0
    """An engine that leaves the run may finish its requests for so long; the rest goes on
    elsewhere.
    """
    tool_format: Literal["auto", "none", "hermes", "llama3", "mistral", "qwen_coder"] = "auto"
    """How the model writes tool calls (docs/tools.md); `none` reads only forced calls."""
    reasoning_format: Literal["auto", "none", "think", "mistral"] = "auto"
    """The markers between which the model thinks before it answers; `none` leaves thinking in the
    content.
    """
    shards: Positive = 1
    """Rollout processes that `train` starts, each with a gateway, agents, buffer and store, on a
    cluster in a seat of its own; larger serves more requests on more cores.
    """
    session_seconds: Seconds = 3600.0
    """A session opened over HTTP ends after this long without a request, and its record is kept as
    long.
    """

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
