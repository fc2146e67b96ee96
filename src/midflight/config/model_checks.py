"""Checks that read the folders of models: a teacher must be able to score the student's tokens, and
a run that goes on must have the model that it began with.
"""

from dataclasses import asdict, replace
from pathlib import Path

from midflight.config.derived import MADE_ARCHITECTURE, lora_alpha, model_sizes
from midflight.config.sections import Config
from midflight.errors import ConfigError
from midflight.models.adapters import adapter_of
from midflight.models.sizes import read_config, sizes_of
from midflight.text.byte_tokenizer import byte_tokenizer
from midflight.text.tokenizer import Tokenizer


def check_teacher(config: Config) -> None:
    """Raises `ConfigError` if the teacher's folder has no model, another vocabulary or another
    tokenizer; nothing without a teacher.
    """
    teacher = config.distillation.teacher
    if teacher is None:
        return
    if not teacher.is_dir():
        raise ConfigError(
            f"distillation.teacher is {str(teacher)!r}, and there is no such folder; give that of "
            "a Hugging Face model."
        )
    theirs = sizes_of(teacher).vocab_size
    ours = model_sizes(config.model).vocab_size
    if theirs < ours:  # further ones are padding: the tokenizers are compared below
        raise ConfigError(
            f"distillation.teacher has a vocabulary of {theirs} tokens, fewer than the student's "
            f"{ours}; choose a teacher of the student's family."
        )
    their_ids = _ids(teacher)
    our_ids = _ids(config.model.path)
    different = sorted(their_ids.items() ^ our_ids.items(), key=lambda item: item[1])
    if different:
        token, number = different[0]
        raise ConfigError(
            "distillation.teacher has another tokenizer: only one of teacher and student has "
            f"{token!r} as token {number}; choose a teacher of the student's family."
        )


def check_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises `ConfigError` if it has more ids than the model has
    rows: such an id would have no embedding.
    """
    tokenizer = Tokenizer.load(folder)
    rows = sizes_of(folder).vocab_size
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer in {str(folder)!r} has ids up to {tokenizer.vocab_size - 1}, and the "
            f"model has {rows} rows of embeddings; give the model its own tokenizer, or resize its "
            "embeddings."
        )
    return tokenizer


def _ids(folder: Path | None) -> dict[str, int]:
    """Ids by token, for a model folder or for made models."""
    backend = byte_tokenizer() if folder is None else Tokenizer.load(folder).backend
    return backend.get_vocab(with_added_tokens=True)


def check_same_model(config: Config) -> None:
    """Raises `ConfigError` with the differences between the configured model and the one in the
    run's folder. Reads headers only.
    """
    start = Path(config.run.folder) / "start"
    if not (start / "config.json").is_file():
        return  # it had not begun: there is no checkpoint to go on from, either
    # A model that is made has no stored numbers yet, so they are not compared.
    began = asdict(replace(sizes_of(start), stored=0))
    asked = asdict(replace(model_sizes(config.model), stored=0))
    began["architecture"] = _architecture(start)
    asked["architecture"] = _architecture(config.model.path)
    adapter = adapter_of(start)
    began["lora.rank"] = None if adapter is None else adapter.rank
    began["lora.alpha"] = None if adapter is None else adapter.alpha
    asked["lora.rank"], asked["lora.alpha"] = _adapters_asked(config)
    if adapter is not None and config.lora.targets:
        began["lora.targets"] = sorted(adapter.targets)
        asked["lora.targets"] = sorted(config.lora.targets)
    differing = [
        f"{name} was {began[name]} and is now {asked[name]}"
        for name in began
        if began[name] != asked[name]
    ]
    if differing:
        raise ConfigError(
            f"resuming {config.run.folder}: it began with another model: {', '.join(differing)}. "
            "Configure the model it began with, or start in another folder."
        )


def _architecture(folder: Path | None) -> str:
    """The architecture that `transformers` would load; without a folder, that of made models."""
    return MADE_ARCHITECTURE if folder is None else str(read_config(folder).get("model_type"))


def _adapters_asked(config: Config) -> tuple[int | None, float | None]:
    """Rank and alpha of the adapters that a new run would train: its own, or those that the model
    folder brings.
    """
    if config.lora.rank is not None:
        return config.lora.rank, lora_alpha(config.lora)
    given = None if config.model.path is None else adapter_of(Path(config.model.path))
    return (None, None) if given is None else (given.rank, given.alpha)
