"""The endpoint of a run: the address at which it is reached, and the token that opens it.

`endpoint.json` in a run's folder has both, for programs of those who may read the folder. It does not import torch.
"""

import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from midflight.errors import ConfigError

NAME = "endpoint.json"
MIN_TOKEN_LENGTH = 16
MAX_TOKEN_LENGTH = 512
TOKEN_VARIABLE = "MIDFLIGHT_CONTROL_TOKEN"
"""The variable that may hold the control token. Child processes do not get it: an agent that
inherited the token could score itself.
"""


class Endpoint(msgspec.Struct, frozen=True):
    """The address and token of a run. Its repr leaves the token out, so that it can be printed."""

    url: str
    control_token: str
    run: str
    model_path: str
    """The folder of the weights that the run began with."""
    api_version: int = 1

    def __repr__(self) -> str:
        return f"<Endpoint of {self.run} at {self.url}>"


def write_endpoint(folder: Path, endpoint: Endpoint) -> None:
    """Writes the file whole or not at all. From its first byte on it is readable by this user
    alone, and by the group with which the folder is shared.
    """
    is_shared = folder.stat().st_mode & stat.S_ISGID
    mode = 0o640 if is_shared else 0o600
    draft = folder / f".{NAME}.writing"
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:  # noqa: PTH123 (the mode is given here)
        file.write(msgspec.json.encode(endpoint))
    draft.replace(folder / NAME)


def remove_endpoint(folder: Path, control_token: str) -> None:
    """Removes the file at the end of the run, when nothing listens there any more. A file that
    another run has written there since stays.
    """
    with suppress(OSError, msgspec.DecodeError):
        written = msgspec.json.decode((folder / NAME).read_bytes(), type=Endpoint)
        if secrets.compare_digest(written.control_token.encode(), control_token.encode()):
            (folder / NAME).unlink()


@dataclass(frozen=True, slots=True)
class ControlToken:
    """The control token. With `is_new` it was drawn here, so the user must be shown it, once."""

    value: str = field(repr=False)
    is_new: bool


def control_token(given: str | None) -> ControlToken:
    """The token that was given, else that of the environment, else a new one."""
    chosen = given or os.environ.get(TOKEN_VARIABLE)
    if chosen is None:
        return ControlToken(secrets.token_urlsafe(24), True)
    return ControlToken(_checked(chosen), False)


def _checked(token: str) -> str:
    """Returns the token; raises `ConfigError` if it could not travel in a header, or could be
    guessed.
    """
    is_of_length = MIN_TOKEN_LENGTH <= len(token) <= MAX_TOKEN_LENGTH
    fits_a_header = token.isascii() and token.isprintable() and " " not in token
    if not is_of_length or not fits_a_header:
        raise ConfigError(
            f"the control token has {len(token)} characters: give {MIN_TOKEN_LENGTH} to "
            f"{MAX_TOKEN_LENGTH} printable ones of ASCII, without spaces."
        )
    return token
