"""A run that goes on has the model it began with: another one in the configuration is refused, not ignored."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from midflight.config.derived import lora_alpha
from midflight.config.memory import model_sizes
from midflight.config.sections import Config
from midflight.errors import ConfigError
from midflight.models.adapter import adapter_of
from midflight.models.sizes import sizes_of


def check_same_model(config: Config) -> None:
    """`ConfigError` names what differs between the configured model and the one in the run's folder. Reads headers only."""
    start = Path(config.run.folder) / "start"
    if not (start / "config.json").is_file():
        return  # it had not begun: there is no checkpoint to go on from, either
    began, asked = asdict(sizes_of(start)), asdict(model_sizes(config.model))
    adapter = adapter_of(start)
    began |= {"lora.rank": None, "lora.alpha": None} if adapter is None else {"lora.rank": adapter.rank, "lora.alpha": adapter.alpha}
    asked["lora.rank"], asked["lora.alpha"] = _adapters_asked(config)
    if adapter is not None and config.lora.targets:
        began["lora.targets"], asked["lora.targets"] = sorted(adapter.targets), sorted(config.lora.targets)
    differing = [f"{name} was {began[name]} and is now {asked[name]}" for name in began if began[name] != asked[name]]
    if differing:
        raise ConfigError(
            f"resuming {config.run.folder}: it began with another model: {', '.join(differing)}. "
            "Configure the model it began with, or start in another folder."
        )


def _adapters_asked(config: Config) -> tuple[int | None, float | None]:
    """Rank and alpha of the adapters that a new run would train: its own, or those that the model folder brings."""
    if config.lora.rank is not None:
        return config.lora.rank, lora_alpha(config.lora)
    given = None if config.model.path is None else adapter_of(Path(config.model.path))
    return (None, None) if given is None else (given.rank, given.alpha)
