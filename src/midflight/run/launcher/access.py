"""Where the parts of a run reach its gateway, and the tokens that they show each other."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Access:
    """One attempt at a run has one. Nobody outside knows more of it than the control token."""

    gateway: str
    """The URL of the first gateway."""
    control_token: str
    engine_token: str
    segment: str
    """The beginning of the names of this run's files of shared memory."""
