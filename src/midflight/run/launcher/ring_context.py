"""The values that the loops of one attempt at a run share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from midflight.config.sections import Config
from midflight.run.launcher.children import Children
from midflight.run.launcher.restarts import RestartBudgets
from midflight.run.parts import Message, Purpose
from midflight.run.places.port import Places


@dataclass(frozen=True, slots=True)
class RingContext:
    """One attempt at a run, once its gateways have their places. Only the control token is known
    outside the run.
    """

    config: Config
    purpose: Purpose
    places: Places
    children: Children
    budgets: RestartBudgets
    """They outlive the context."""
    say: Callable[[Message], None]
    """Passes a message on. It must not raise or wait."""
    gateways: Sequence[str]
    """The URLs of the gateways, the first gateway's first."""
    control_token: str
    engine_token: str
    worker_token: str
    segment: str
    """The beginning of the names of this run's files of shared memory."""
    seconds: Callable[[], float]
    """Tells the time that the run has run so far."""
