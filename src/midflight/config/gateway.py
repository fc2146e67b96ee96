"""The options of the gateway."""

from typing import Literal
from urllib.parse import urlsplit

from midflight.config.section import NonNegative, Port, Positive, Seconds, Section


class GatewaySection(Section):
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback exposes the endpoint. It is for agents on other
    machines.
    """
    port: Port = 0
    """0 takes a free port."""
    public_url: str = ""
    """The beginning of the addresses of sessions given over HTTP, and of `client.public_url`, for
    agents on other machines, such as `https://proxy.example`. If it is empty, they have the address
    of the connection that asked. An endpoint on loopback answers to loopback's names and to this
    one's. If any name were allowed, a web page could make its visitors' browsers ask (DNS
    rebinding).
    """
    private_metrics: bool = False
    """`/metrics` asks for the control token."""
    strict: bool = False
    """Refuse by name fields that have no effect on the text, and limits above the room there is.
    Without this option such a field is ignored and named in a header of the answer
    (`x-midflight-ignored`), and such a limit is lowered (`x-midflight-clamped`). It is for those
    who move a client here and want to know what it loses.
    """
    request_seconds: Seconds = 120.0
    """How long an answer may go without one new token on an engine that serves it; pauses, and
    waits for an engine that is full or away, do not count. Larger waits longer for an answer that
    an engine has lost. A session's generation survives the loss of its client for a fourth of that,
    and so does its answer, for a retry.
    """
    max_sessions: Positive = 10_000
    """Live sessions, and requests under way; further ones are answered 429. It is for those who
    serve more agents, or have little memory.
    """
    drain_seconds: NonNegative = 20.0
    """An engine that leaves the run may finish its requests for so long; the others go on on other
    engines. Larger moves fewer requests, and lets go of machines later. It is for machines that are
    taken away at short notice.
    """
    tool_format: Literal["auto", "none", "hermes", "llama3", "mistral", "qwen_coder"] = "auto"
    """How the model writes tool calls; `auto` finds it in the chat template or the special tokens,
    else it is `hermes`; `none` reads no calls but forced ones, in Hermes form. A name is for models
    whose template does not show it.
    """
    reasoning_format: Literal["auto", "none", "think", "mistral"] = "auto"
    """The markers between which the model thinks before it answers; `auto` finds them as above,
    `none` leaves thinking in the content. A name is for models whose template does not show them.
    """
    shards: Positive = 1
    """Rollout processes that `train` starts, each with a gateway, agents, buffer and store of its
    own and an equal part of the groups; larger serves more requests on more cores.
    """
    session_seconds: Seconds = 3600.0
    """A session opened over HTTP ends after this long without a request, and its record is kept as
    long for its owner; larger waits longer for late rewards.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the endpoint answers to, beside those of loopback."""
        public = urlsplit(self.public_url).hostname
        return (public,) if public else ()
