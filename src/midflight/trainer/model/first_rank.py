"""A model that only the first rank has, on its way to the others."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor, nn

from midflight.errors import RunFailed
from midflight.trainer.model.rank_buckets import spread
from midflight.trainer.model.ranks import Ranks


class FirstRanksModel:
    """The weights of a module, of which the first rank has the numbers. The parameters of the others
    are on the meta device. All methods are collective, apart from `make_room`.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, *, device: torch.device) -> None:
        """Raises `RunFailed` if a rank has made another module than the first."""
        self._module = module
        self._ranks = ranks
        self._device = device
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """The parameters that got memory, with those in whose place they are. Both are kept: the
        number of an object that is gone may be another one's.
        """
        self._whole: dict[str, Tensor] = {}
        if ranks.is_first:
            for name, parameter in module.named_parameters():
                self._whole[name] = parameter.detach().cpu()
        self._take_dtypes()

    def make_room(self, part: nn.Module) -> None:
        """Gives the parameters of a part memory on the device. They have no numbers yet. Tied ones
        stay tied.
        """
        for module in part.modules():
            own = list(module.named_parameters(recurse=False, remove_duplicate=False))
            for name, parameter in own:
                if not parameter.is_meta:
                    continue
                if id(parameter) not in self._made:
                    empty = torch.empty_like(parameter, device=self._device)
                    made = nn.Parameter(empty, parameter.requires_grad)
                    self._made[id(parameter)] = (parameter, made)
                setattr(module, name, self._made[id(parameter)][1])

    def fill(self) -> None:
        """Gives each rank its rows of the parameters, and the buffers. The module is sharded by
        now.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            tensors[name] = parameter.detach()
        for name, buffer in self._module.named_buffers():
            tensors[name] = buffer
        spread(tensors, self._whole, self._ranks)

    def _take_dtypes(self) -> None:
        """Makes the dtypes those of the first rank: loading keeps some layers of some architectures
        in float32.
        """
        own = _described(self._module)
        first = msgspec.json.decode(self._ranks.from_first(own), type=dict[str, _Outline])
        here = msgspec.json.decode(own, type=dict[str, _Outline])
        differing = {
            name for name in here.keys() | first.keys() if _shape(here, name) != _shape(first, name)
        }
        if differing:
            raise RunFailed(
                f"loading the model on rank {self._ranks.rank}: {min(differing)!r} is not as on the "
                "first rank; install the same version of transformers on all machines."
            )
        for name, parameter in self._module.named_parameters():
            dtype = _dtype(first, name)
            if parameter.dtype is not dtype:
                parameter.data = parameter.data.to(dtype)
        for module_name, module in self._module.named_modules():
            before = f"{module_name}." if module_name else ""
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(self._device, _dtype(first, before + name)))


_Outline = tuple[tuple[int, ...], str]
"""Shape, and torch's name of the dtype."""


def _described(module: nn.Module) -> bytes:
    """The parameters and buffers of a module, without their numbers, as JSON."""
    found: dict[str, _Outline] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        found[name] = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return msgspec.json.encode(found)


def _shape(outlines: Mapping[str, _Outline], name: str) -> tuple[int, ...] | None:
    return outlines[name][0] if name in outlines else None


def _dtype(outlines: Mapping[str, _Outline], name: str) -> torch.dtype | None:
    """None for the name of a buffer that is also another's."""
    return getattr(torch, outlines[name][1]) if name in outlines else None
