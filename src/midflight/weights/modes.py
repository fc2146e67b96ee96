"""Which pause mode a commit uses on which engine (DECISIONS 19)."""

from __future__ import annotations

from typing import Literal

from midflight.errors import NotSupported
from midflight.types import Capabilities, PauseMode

_PREFERENCE = (PauseMode.RECOMPUTE, PauseMode.ABORT, PauseMode.DRAIN)


def mode_for(engine: str, capabilities: Capabilities, wanted: PauseMode | Literal["auto"]) -> PauseMode:
    """`auto`: what the engine says; else keep where it offers it and says the version of every token, else recompute, abort, drain.

    `NotSupported` when the engine lacks the mode that was asked for, or has none at all.
    """
    has = capabilities.pause_modes
    if wanted != "auto":
        if wanted not in has:
            raise NotSupported(
                f"pausing engine {engine!r} by {wanted.value}: it can {_listed(has)}; set rollout.pause_mode to one of these or auto."
            )
        return wanted
    if capabilities.commit_mode is not None and capabilities.commit_mode in has:
        return capabilities.commit_mode
    if PauseMode.KEEP in has and capabilities.versions_per_token:
        return PauseMode.KEEP
    for mode in _PREFERENCE:
        if mode in has:
            return mode
    raise NotSupported(f"pausing engine {engine!r}: it can {_listed(has)}, which is not enough to change weights; use another engine.")


def swaps_between_steps(capabilities: Capabilities, mode: PauseMode) -> bool:
    """Whether a commit needs no pause of ours: staged weights go live between two steps, if need be in a pause that the engine makes."""
    return capabilities.stages_weights and mode is (capabilities.commit_mode or PauseMode.KEEP)


def _listed(modes: frozenset[PauseMode]) -> str:
    return ", ".join(sorted(m.value for m in modes)) or "no pause at all"
