"""`endpoint.json` in a run's folder: where the run is reached and by which token, for programs of the same user. Torch-free."""

from __future__ import annotations

import ipaddress
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from midflight.errors import ConfigError

NAME = "endpoint.json"
MIN_TOKEN_LENGTH, MAX_TOKEN_LENGTH = 16, 512
TOKEN_VARIABLE = "MIDFLIGHT_CONTROL_TOKEN"
"""Kept from children: what an agent inherits, it could score itself with."""


class Endpoint(msgspec.Struct, frozen=True):
    """Its repr would hold the token: never print one."""

    url: str
    control_token: str
    run: str
    model_path: str
    """Folder of the weights that the run began with."""
    api_version: int = 1

    def __repr__(self) -> str:
        return f"<Endpoint of {self.run} at {self.url}>"


def write_endpoint(folder: Path, endpoint: Endpoint) -> None:
    """Readable by this user alone, from its first byte on; whole or not at all."""
    draft = folder / f".{NAME}.writing"
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123 (the mode is given here)
        file.write(msgspec.json.encode(endpoint))
    draft.replace(folder / NAME)


def remove_endpoint(folder: Path, control_token: str) -> None:
    """When the run ends: nobody listens there any more. One that another run has written there since stays."""
    with suppress(OSError, msgspec.DecodeError):
        if msgspec.json.decode((folder / NAME).read_bytes(), type=Endpoint).control_token == control_token:
            (folder / NAME).unlink()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; a name counts as others do, `localhost` excepted."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def exposure(host: str, *, anonymous: bool) -> str | None:
    """What listening there exposes, as a warning; None on loopback. `anonymous`: requests without a session are answered."""
    if is_loopback(host):
        return None
    generation = "generation for everybody, without a token" if anonymous else "generation for whoever holds a session's address"
    return (
        f"warning: {host} can be reached from other machines, and there is no TLS. Exposed are {generation}; /health and /metrics for everybody; "
        "the control plane and /midflight/v1 for whoever holds the control token. Listen on 127.0.0.1 behind a proxy, or keep the network private."
    )


@dataclass(frozen=True, slots=True)
class ControlToken:
    """`is_new`: drawn here, so that somebody must be told it, once."""

    value: str = field(repr=False)
    is_new: bool


def control_token(given: str | None) -> ControlToken:
    """The one given, else that of the environment, else a new one."""
    chosen = given or os.environ.get(TOKEN_VARIABLE)
    return ControlToken(secrets.token_urlsafe(24), True) if chosen is None else ControlToken(_checked(chosen), False)


def _checked(token: str) -> str:
    """`ConfigError` when it could not travel in a header, or could be guessed."""
    if not MIN_TOKEN_LENGTH <= len(token) <= MAX_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the control token has {len(token)} characters: give {MIN_TOKEN_LENGTH} to {MAX_TOKEN_LENGTH} printable ones of ASCII, "
            "without spaces."
        )
    return token
