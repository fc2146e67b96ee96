"""The base of every section, and the kinds of numbers that options have. Nothing here imports
torch.
"""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

_ADDRESS = re.compile(r"https?://[^\s?#]+")

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0.001, le=1e9)]
"""No process can be as fast as the least, and the most are thirty years."""
Patience = Annotated[float, Field(ge=1, le=1e9)]
"""Seconds after which one answer or one rollout is ended. Sound ones take longer than the least
now and then, on any machine.
"""
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, le=1e30)]
Rate = Annotated[float, Field(gt=0, le=1)]
"""A step size of AdamW, which moves each weight by about so much."""
Above0 = Annotated[float, Field(gt=0, le=1e30)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """Frozen; unknown keys are refused by the loader, which knows the nearest one.

    The sentence under an option is its documentation; `reference` reads it from the source.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def is_address(text: str) -> bool:
    """True for the beginning of addresses of a server: with http or https, a host and perhaps a
    port and a path.
    """
    if not _ADDRESS.fullmatch(text):
        return False
    try:
        parts = urlsplit(text)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # its port is no number, or too large
        return False
