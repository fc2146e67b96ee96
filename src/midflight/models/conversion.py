"""The names and shapes of tensors in the files of a model folder, if `transformers` has others in
memory.

`transformers` fuses the experts of a layer into two tensors, and renames modules of older
checkpoints. Other people's servers read files, so they get the tensors that `save_pretrained` would
write. `transformers` notes with a model how it changed the tensors of its files, and can undo that.
A part of a tensor stays a view of it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    PreTrainedModel,
    conversion_mapping,
    core_model_loading,
    modeling_utils,
)

from midflight.models.load import auto_class, check_folder

Shapes = Mapping[str, tuple[int, ...]]


class FileNames:
    """The file names of the model in a folder. No weights are read: a model whose tensors have no
    memory goes through the renaming of a load.
    """

    def __init__(self, folder: Path, shapes: Shapes) -> None:
        """`shapes` are those of the tensors in the folder's files. Raises `ModelNotFound` if the
        folder holds no model.
        """
        check_folder(folder)
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        with torch.device("meta"):
            self._model: PreTrainedModel = auto_class(config).from_config(config)
        mapping = cast("list[Any]", conversion_mapping.get_model_conversion_mapping(self._model))
        options = modeling_utils.LoadStateDictConfig(
            device_map={"": "meta"}, dtype=self._model.dtype, weight_mapping=mapping
        )
        core_model_loading.convert_and_load_state_dict_in_model(
            self._model, _without_memory(shapes), options
        )
        self.unread = frozenset(shapes.keys() - self.tensors(self._text_tower()).keys())
        """Tensors of the files that are not of the text tower. In a multimodal folder they are not
        trained.
        """

    def shapes(self, given: Shapes) -> dict[str, tuple[int, ...]]:
        """The names and shapes in files of tensors that have these in memory."""
        found = self.tensors(_without_memory(given))
        return {name: tuple(tensor.shape) for name, tensor in found.items()}

    @torch.no_grad()
    def tensors(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that `save_pretrained` would write for these tensors in memory. Several that
        become one in files must be given together.
        """
        return dict(core_model_loading.revert_weight_conversion(self._model, dict(given)))

    def _text_tower(self) -> dict[str, Tensor]:
        """The tensors that compute text, in a model that may do more."""
        own = set[int]()
        for part in (self._model.get_decoder(), self._model.get_output_embeddings()):
            if part is not None:
                own.update(id(tensor) for tensor in part.state_dict(keep_vars=True).values())
        return {
            name: tensor.detach()
            for name, tensor in self._model.state_dict(keep_vars=True).items()
            if id(tensor) in own
        }


def _without_memory(shapes: Shapes) -> dict[str, Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
