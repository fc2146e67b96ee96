"""The address at which the parts of a run reach its gateway, and the tokens that they show."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Access:
    """The tokens of one attempt at a run. Only the control token is known outside the run."""

    gateway: str
    """The URL of the first gateway."""
    control_token: str
    engine_token: str
    segment: str
    """The beginning of the names of this run's files of shared memory."""
