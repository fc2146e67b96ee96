"""Several datasets as one, as trl's scripts name them in the YAML file of `--config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from midflight.errors import ConfigError, nearest

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


@dataclasses.dataclass
class DatasetConfig:
    """One dataset of a mixture: what `datasets.load_dataset` is called with."""

    path: str
    """A folder or a file's format, as `load_dataset` takes it."""
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    """The columns that are kept. None keeps all."""
    fraction: float | None = None
    """Refused: rows are drawn by the weights of sources here."""


@dataclasses.dataclass
class DatasetMixtureConfig:
    """Datasets that are trained on together. `ConfigError` for what a mixture has not here."""

    datasets: list[DatasetConfig] = dataclasses.field(
        default_factory=list[DatasetConfig],
        metadata={"help": "datasets of a mixture, in the file of --config"},
    )
    streaming: bool = dataclasses.field(
        default=False, metadata={"help": "refused: all rows are read before training"}
    )
    test_split_size: float | None = dataclasses.field(
        default=None, metadata={"help": "share of the rows that is kept for evaluation"}
    )

    def __post_init__(self) -> None:
        self.datasets = [_dataset(number, given) for number, given in enumerate(self.datasets)]
        if self.streaming:
            raise ConfigError("streaming=True: all rows are read before training; leave it out.")


def _dataset(number: int, given: DatasetConfig | Mapping[str, Any]) -> DatasetConfig:
    """The dataset of an entry, which a YAML file gives as a mapping."""
    if isinstance(given, DatasetConfig):
        found = given
    else:
        known = [field.name for field in dataclasses.fields(DatasetConfig)]
        for name in given:
            if name not in known:
                raise ConfigError(
                    f"datasets[{number}] has an unknown option {name!r}.{nearest(name, known)}"
                )
        if "path" not in given:
            raise ConfigError(f"datasets[{number}] has no path: name the dataset's folder.")
        found = DatasetConfig(**given)
    if found.fraction is not None:
        raise ConfigError(
            f"datasets[{number}].fraction={found.fraction}: all rows of a mixture are used; for "
            "shares give midflight.Trainer several sources, each with its weight."
        )
    return found


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict:
    """The datasets of a mixture, one after the other, as its split `train`; the share of
    `test_split_size` as `test`. `ConfigError` where there is none.
    """
    import datasets  # here: only scripts that read datasets need it

    if not mixture_config.datasets:
        raise ConfigError("the mixture has no datasets: name them under `datasets`.")
    loaded = [_loaded(each) for each in mixture_config.datasets]
    together = datasets.concatenate_datasets(loaded)
    if mixture_config.test_split_size is None:
        return datasets.DatasetDict({"train": together})
    return together.train_test_split(test_size=mixture_config.test_split_size)


def _loaded(config: DatasetConfig) -> Dataset:
    import datasets

    found: Any = datasets.load_dataset(
        config.path,
        name=config.name,
        data_dir=config.data_dir,
        data_files=config.data_files,
        split=config.split,
    )
    return found if config.columns is None else found.select_columns(config.columns)
