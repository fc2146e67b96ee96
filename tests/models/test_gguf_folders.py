"""Where a model is asked for, a GGUF file stands for the folder that it is converted into."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from midflight.errors import ConfigError, ModelNotFound
from midflight.models import gguf_folders
from midflight.models.gguf_folders import model_folder

from .ggufs import tiny_llama, write_gguf


def test_a_folder_stands_for_itself_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "odd.gguf").mkdir()
    for path in (tmp_path, tmp_path / "odd.gguf", tmp_path / "none"):
        assert model_folder(path) == path


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"there is no file .*tiny.gguf"):
        model_folder(tmp_path / "tiny.gguf")


def test_without_the_package_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"reading GGUF files needs gguf, which .* lacks: pip install 'midflight\[gguf\]'"):
        model_folder(file)
    assert list(tmp_path.iterdir()) == [file]


def test_a_transformers_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    monkeypatch.setattr(gguf_folders, "version", lambda name: "5.9.1")
    with pytest.raises(ConfigError, match=r"needs transformers 5.23, and 5.9.1 is here: pip install -U 'midflight\[gguf\]'"):
        model_folder(file)
