from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from midflight.config import load_config
from midflight.config.sections import Config
from midflight.errors import ConfigError
from midflight.models.adapters import FOLDER
from midflight.models.load import load_model
from midflight.models.lora import add_adapters, lora_config, save_adapters
from midflight.run.launcher.checks.model import check_same_model
from midflight.run.trainer.trainer_process import first_model

SMALL = ("model.hidden_size=32", "model.intermediate_size=64", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    first_model(load_config(None, SMALL).model, tmp_path / "start", seed=0)
    return tmp_path


def configured(folder: Path, *more: str) -> Config:
    return load_config(None, [f"run.folder={folder}", *SMALL, *more])


def test_a_run_goes_on_with_the_model_it_began_with(folder: Path) -> None:
    check_same_model(configured(folder))
    check_same_model(configured(folder, "run.steps=500", "trainer.learning_rate=1e-5"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("model.num_layers=2", "num_layers was 1 and is now 2"),
        ("model.intermediate_size=96", "intermediate_size was 64 and is now 96"),
        ("model.max_context=512", "max_context was 256 and is now 512"),
        ("lora.rank=4", "lora.rank was None and is now 4"),
    ],
)
def test_another_model_is_refused_with_what_differs(folder: Path, change: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_same_model(configured(folder, change))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("lora.rank=8", "lora.rank was 4 and is now 8"),
        ("lora.alpha=64", "lora.alpha was 8.0 and is now 64.0"),
        ('lora.targets=["q_proj"]', r"lora.targets was \['k_proj', 'q_proj'\] and is now \['q_proj'\]"),
    ],
)
def test_other_adapters_are_refused_with_what_differs(folder: Path, change: str, expected: str) -> None:
    model = load_model(folder / "start", dtype="float32")
    add_adapters(model, lora_config(model, rank=4, alpha=8, targets=["q_proj", "k_proj"]), seed=0)
    save_adapters(model, folder / "start" / FOLDER)
    check_same_model(configured(folder, "lora.rank=4"))
    with pytest.raises(ConfigError, match=expected):
        check_same_model(configured(folder, "lora.rank=4", change))


def test_a_run_goes_on_with_the_adapters_that_its_model_folder_brought(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder / "start", dtype="float32")
    add_adapters(model, lora_config(model, rank=4, alpha=8), seed=0)
    save_adapters(model, folder / "start" / FOLDER)
    given = tmp_path / "given"
    shutil.copytree(folder / "start", given)
    check_same_model(load_config(None, [f"run.folder={folder}", f"model.path={given}"]))


def test_another_architecture_of_the_same_sizes_is_refused(folder: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    shutil.copytree(folder / "start", given)
    config = json.loads((given / "config.json").read_text())
    (given / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ConfigError, match="architecture was qwen3 and is now llama"):
        check_same_model(load_config(None, [f"run.folder={folder}", f"model.path={given}"]))


def test_another_folder_of_the_same_sizes_is_the_same_model_as_far_as_can_be_told(folder: Path) -> None:
    check_same_model(load_config(None, [f"run.folder={folder}", f"model.path={folder / 'start'}"]))
