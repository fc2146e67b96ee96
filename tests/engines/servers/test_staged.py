"""The folders from which servers load weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.engines.models import MemoryReceiver
from tests.models.mixtures import tiny_mixture, tiny_seeing
from tests.models.tiny import tiny_adapted, tiny_model

from midflight.engines.servers.staged import StagingArea, tensor_shapes, write_first
from midflight.errors import EngineUnavailable, RunFailed, WeightsCorrupt
from midflight.models.load import load_model, save_model
from midflight.models.lora import add_adapters, lora_config
from midflight.models.names import assign, named_tensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(tiny_model(), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    return tmp_path / "model"


def area(tmp_path: Path, model: Path, receiver: MemoryReceiver) -> StagingArea:
    return StagingArea(tmp_path / "staging", model=model, receiver=receiver)


def test_a_staged_version_is_a_model_folder_that_others_can_load(tmp_path: Path, model: Path) -> None:
    receiver = MemoryReceiver()
    manifest = receiver.publish(4, tiny_model(seed=4))
    staged = area(tmp_path, model, receiver).write(manifest, beside=None)
    assert (staged.version, staged.fingerprint) == (4, manifest.fingerprint)
    loaded = named_tensors(load_model(staged.folder, dtype="float32"))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in named_tensors(tiny_model(seed=4)).items())
    assert (staged.folder / "tokenizer.json").exists() and not (staged.folder / "model.safetensors.index.json").exists()


def test_the_version_that_is_served_is_never_written_over(tmp_path: Path, model: Path) -> None:
    receiver = MemoryReceiver()
    place = area(tmp_path, model, receiver)
    live = place.write(receiver.publish(1, tiny_model(seed=1)), beside=None)
    for version in (2, 3, 4):
        staged = place.write(receiver.publish(version, tiny_model(seed=version)), beside=live.folder)
        assert staged.folder != live.folder
        expected = named_tensors(tiny_model(seed=1))["model.norm.weight"]
        assert torch.equal(load_file(live.folder / "model.safetensors")["model.norm.weight"], expected)


def test_tensors_in_another_precision_are_written_as_they_came(tmp_path: Path, model: Path) -> None:
    receiver = MemoryReceiver()
    staged = area(tmp_path, model, receiver).write(receiver.publish(1, tiny_model(seed=1, dtype="bfloat16")), beside=None)
    assert {t.dtype for t in load_file(staged.folder / "model.safetensors").values()} == {torch.bfloat16}


def test_shapes_are_read_from_every_file_of_a_model(tmp_path: Path, model: Path) -> None:
    shutil.copy(model / "model.safetensors", model / "model-2.safetensors")
    assert tensor_shapes(model)["model.norm.weight"] == (32,)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "'model.norm.weight' is missing"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}), r"\(31,\), the server's model needs \(32,\)"),
        (
            lambda tensors: tensors.update({"model.norm.weigth": torch.ones(32)}),
            "no tensor 'model.norm.weigth'. Did you mean 'model.norm.weight'",
        ),
    ],
)
def test_a_version_that_does_not_fit_the_model_is_refused_before_anything_is_written(tmp_path: Path, model: Path, spoil, says: str) -> None:
    receiver = MemoryReceiver()
    tensors = dict(named_tensors(tiny_model(seed=1)))
    spoil(tensors)
    with pytest.raises(WeightsCorrupt, match=says):
        area(tmp_path, model, receiver).write(receiver.publish_tensors(1, tensors), beside=None)
    assert not (tmp_path / "staging").exists()


def test_a_place_without_room_is_named_with_the_remedy(tmp_path: Path, model: Path) -> None:
    receiver = MemoryReceiver()
    (tmp_path / "staging").write_text("a file, where a folder should be made")
    with pytest.raises(EngineUnavailable, match=r"staging version 1 in .*make room there"):
        area(tmp_path, model, receiver).write(receiver.publish(1, tiny_model(seed=1)), beside=None)


def test_nothing_is_left_when_it_is_removed(tmp_path: Path, model: Path) -> None:
    receiver = MemoryReceiver()
    place = area(tmp_path, model, receiver)
    place.write(receiver.publish(1, tiny_model(seed=1)), beside=None)
    place.remove()
    place.remove()
    assert not (tmp_path / "staging").exists()


def test_adapters_are_merged_into_their_base_for_servers(tmp_path: Path) -> None:
    save_model(tiny_adapted(seed=1), tmp_path / "model")
    receiver = MemoryReceiver()
    place = area(tmp_path, tmp_path / "model", receiver)
    staged = place.write(receiver.publish(4, tiny_adapted(seed=4)), beside=None)
    ids = torch.tensor([[1, 2, 3]])
    for folder, seed in ((staged.folder, 4), (write_first(tmp_path / "model", tmp_path / "staging"), 1)):
        assert not (folder / "adapter").exists()
        found = load_model(folder, dtype="float32")(ids).logits
        torch.testing.assert_close(found, tiny_adapted(seed=seed)(ids).logits, rtol=0, atol=1e-5)
    assert place.first == write_first(tmp_path / "model", tmp_path / "staging")


def test_no_room_for_the_first_weights_is_told_with_the_remedy(tmp_path: Path) -> None:
    save_model(tiny_adapted(), tmp_path / "model")
    (tmp_path / "staging").write_text("no folder")
    with pytest.raises(RunFailed, match=r"writing the first weights in .*staging/first.*make room there"):
        write_first(tmp_path / "model", tmp_path / "staging")


def test_a_server_of_a_model_without_adapters_starts_from_its_own_folder(tmp_path: Path, model: Path) -> None:
    assert write_first(model, tmp_path / "staging") == model == area(tmp_path, model, MemoryReceiver()).first
    assert not (tmp_path / "staging").exists()


def test_whole_weights_are_refused_where_adapters_are_expected(tmp_path: Path) -> None:
    save_model(tiny_adapted(), tmp_path / "model")
    receiver = MemoryReceiver()
    with pytest.raises(WeightsCorrupt, match=r"no tensor 'model\.embed_tokens\.weight'"):
        area(tmp_path, tmp_path / "model", receiver).write(receiver.publish(1, tiny_model(seed=1)), beside=None)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_a_version_of_a_mixture_is_staged_with_one_tensor_for_each_expert(tmp_path: Path, kind: str) -> None:
    save_model(tiny_mixture(kind), tmp_path / "model")
    receiver = MemoryReceiver()
    place = area(tmp_path, tmp_path / "model", receiver)
    for version in (3, 4):
        staged = place.write(receiver.publish(version, tiny_mixture(kind, seed=version)), beside=None)
        save_model(tiny_mixture(kind, seed=version), tmp_path / "expected")
        found, expected = (load_file(f / "model.safetensors") for f in (staged.folder, tmp_path / "expected"))
        assert found.keys() == expected.keys() and sum(".experts.7." in name for name in found) == 2 * 3  # layers, matrices
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_version_of_a_mixture_that_lacks_its_experts_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_model(tiny_mixture("mixtral"), tmp_path / "model")
    receiver = MemoryReceiver()
    tensors = {n: t for n, t in named_tensors(tiny_mixture("mixtral")).items() if "experts.down_proj" not in n}
    with pytest.raises(WeightsCorrupt, match=r"'model\.layers\.0\.block_sparse_moe\.experts\.0\.w2\.weight' is missing"):
        area(tmp_path, tmp_path / "model", receiver).write(receiver.publish_tensors(1, tensors), beside=None)
    assert not (tmp_path / "staging").exists()


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3"])
def test_what_is_not_trained_of_a_multimodal_folder_lies_beside_every_version(tmp_path: Path, kind: str) -> None:
    """The text tower is a model of its own, or a part of the one that was loaded; its names in files say where it hangs in the whole."""
    whole = tiny_seeing(tmp_path / "model", kind=kind)
    receiver = MemoryReceiver()
    place, before = area(tmp_path, tmp_path / "model", receiver), load_file(whole / "model.safetensors")
    text = load_model(whole, dtype="float32")
    seeing = ("vision_tower", "multi_modal_projector", ".visual.")
    trained = {name: tensor + 1 for name, tensor in named_tensors(text).items() if not any(part in name for part in seeing)}
    for version in (1, 2):
        staged = place.write(receiver.publish_tensors(version, trained), beside=None)
        found = load_file(staged.folder / "model.safetensors") | load_file(staged.folder / "model-rest.safetensors")
        assert found.keys() == before.keys()
        for name, tensor in before.items():
            assert torch.equal(found[name], tensor if any(part in name for part in seeing) else tensor + 1), name


def test_adapters_of_a_mixture_are_merged_beside_its_experts(tmp_path: Path) -> None:
    """They reach attention alone; experts and routers go out as they are."""
    model = tiny_mixture("mixtral")
    add_adapters(model, lora_config(model, rank=4, alpha=8), seed=0)
    save_model(model, tmp_path / "model")
    assign(model, {name: torch.full(tensor.shape, 0.1) for name, tensor in named_tensors(model).items()})
    receiver = MemoryReceiver()
    staged = area(tmp_path, tmp_path / "model", receiver).write(receiver.publish(1, model), beside=None)
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(load_model(staged.folder, dtype="float32")(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", staged.folder))
    moved = {name.split(".")[3] for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and moved == {"self_attn"}
