"""The processors that engines and trainer leave free. Advice on the number of engines depends on
them.
"""

import os
from dataclasses import dataclass

from midflight.config.derived import computing_threads
from midflight.config.sections import Config


@dataclass(frozen=True, slots=True)
class CoreUse:
    """The use that engines and trainer make of the machine's cores. The defaults are for a machine
    of which nothing is known: there more engines may be advised.
    """

    are_full: bool = False
    """Engines and trainer have a thread for every core: more of either would only slow the
    other.
    """
    can_lend: bool = False
    """The trainer's cores could generate while it waits, and do not (`engine.lend`)."""
    can_shift: bool = False
    """The trainer has several threads, of which some could be the engines'."""
    can_give: bool = True
    """The engines have several threads, of which some could be the trainer's."""
    has_one_engine: bool = False
    """There is one engine, and fewer cannot be advised."""


def own_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_use(config: Config, cores: int) -> CoreUse:
    """The use of a machine with this many cores. Nothing is known of a cluster, of engines on GPUs
    and of servers that others started.
    """
    engine = config.engine
    trainer = config.trainer
    has_one_engine = engine.count == 1
    is_here = config.cluster.kind == "local" and engine.device == "cpu" and not engine.urls
    if not is_here or computing_threads(config) < cores:
        return CoreUse(has_one_engine=has_one_engine)
    is_lendable = engine.kind == "embedded" and trainer.device == "cpu" and not engine.lend
    return CoreUse(
        are_full=True,
        can_lend=is_lendable,
        can_shift=trainer.device == "cpu" and trainer.threads > 1,
        can_give=engine.count * engine.threads > 1,
        has_one_engine=has_one_engine,
    )
