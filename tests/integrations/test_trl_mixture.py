"""Several datasets as one, for trl's scripts."""

import json
from pathlib import Path

import pytest

from midflight.errors import ConfigError
from midflight.integrations.trl import DatasetConfig, DatasetMixtureConfig, get_dataset


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    found: list[str] = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        rows = [{"prompt": f"{name}{number}", "more": number} for number in range(4)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found.append(str(folder))
    return found


def test_datasets_come_one_after_the_other_with_the_columns_that_are_named(folders: list[str]) -> None:
    mixture = DatasetMixtureConfig([DatasetConfig(folders[0], columns=["prompt"]), DatasetConfig(folders[1], columns=["prompt"])])
    found = get_dataset(mixture)
    assert found.column_names == {"train": ["prompt"]}
    assert found["train"]["prompt"][:] == [f"{name}{number}" for name in "ab" for number in range(4)]


def test_a_share_of_the_rows_is_kept_for_evaluation(folders: list[str]) -> None:
    found = get_dataset(DatasetMixtureConfig([DatasetConfig(folders[0])], test_split_size=0.25))
    assert {name: len(rows) for name, rows in found.items()} == {"train": 3, "test": 1}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"path": "a", "splits": "train"}, r"datasets\[0\] has an unknown option 'splits'.*split"),
        ({"name": "a"}, r"datasets\[0\] has no path"),
        ({"path": "a", "fraction": 0.5}, r"datasets\[0\]\.fraction=0\.5.*weight"),
    ],
)
def test_an_entry_that_cannot_be_is_named(entry: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DatasetMixtureConfig([entry])  # type: ignore[list-item]


def test_what_a_mixture_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="streaming=True"):
        DatasetMixtureConfig(streaming=True)
    with pytest.raises(ConfigError, match="no datasets"):
        get_dataset(DatasetMixtureConfig())
