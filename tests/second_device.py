"""A second device for tests, on a machine that has none: its tensors say that they are on `second:0`, and compute on the CPU.

What a GPU would refuse they refuse: an operation on tensors of both devices, and numpy. What waits on a GPU is allowed, as there: copies
between the devices, numbers without dimensions beside them, and reading a value. `crossed` counts the bytes of such copies. Kernels are the
CPU's, so results are those of the CPU to the bit. gloo broadcasts its tensors as NCCL does a GPU's, which is no proof of NCCL. It works in every thread, because operations come here by the dispatcher's own table and not by a context. `here` registers it, for the
rest of the process, and before the process computes its first gradient: the engine of autograd counts devices once.
"""

from __future__ import annotations

import threading
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroupGloo
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "second"
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.ops.aten._copy_from.default)


class Crossed:
    """The bytes that were copied from one device to the other, and the threads that chose the second one."""

    def __init__(self) -> None:
        self.to_host = self.from_host = 0
        self.chosen: list[str] = []

    def clear(self) -> None:
        self.__init__()


crossed = Crossed()


class Resident:
    """The bytes of all tensors on the second device, each storage once: now, and the most since `peak` was set."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._holders: dict[int, int] = {}

    def add(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        place = storage.data_ptr()
        if storage.nbytes() and place not in self._holders:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self._holders[place] = self._holders.get(place, 0) + 1
        return place, storage.nbytes()

    def remove(self, held: tuple[int, int]) -> None:
        place, num_bytes = held
        self._holders[place] -= 1
        if not self._holders[place]:
            del self._holders[place]
            self.now -= num_bytes

    def leave(self, place: list[tuple[int, int]]) -> None:
        self.remove(place[0])


resident = Resident()


class Elsewhere(Tensor):
    """A tensor of the second device; `held` has its values. It is no attribute that a copy of a tensor's attributes would take along."""

    __slots__ = ("held", "place")
    held: Tensor
    place: list[tuple[int, int]]
    """Where its bytes are counted."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        sizes = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        with torch.inference_mode(mode=False):  # in which no view of another can be made of one
            made = Tensor._make_wrapper_subclass(cls, held.size(), **sizes, dtype=held.dtype, device=torch.device(NAME, 0))
        made.held = held
        made.place = [resident.add(held.untyped_storage())]
        weakref.finalize(made, resident.leave, made.place)
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(operation, args, kwargs or {})

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Elsewhere({self.held!r})"

    # What reads, copies or changes a tensor below the dispatcher:

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = _like(self, Elsewhere(self.held.detach().clone()))
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.held.tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    @property
    def data(self) -> Tensor:
        return Elsewhere(self.held.data)

    @data.setter
    def data(self, value: Tensor) -> None:
        assert isinstance(value, Elsewhere), "what is assigned must be on the second device too"
        place = resident.add(value.held.untyped_storage())
        resident.leave(self.place)
        self.place[0] = place
        self.held = value.held


def _like(tensor: Tensor, made: Elsewhere) -> Tensor:
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _compute(operation: Any, args: Any, kwargs: Any) -> Any:
    given = pytree.tree_leaves((args, kwargs))
    there = [leaf for leaf in given if isinstance(leaf, Elsewhere)]
    if there and operation not in _COPIES:
        for leaf in given:
            if isinstance(leaf, Tensor) and not isinstance(leaf, Elsewhere) and leaf.dim():
                raise RuntimeError(f"{operation}: a tensor of shape {tuple(leaf.shape)} is on the CPU, and another on the second device")
    device = kwargs.get("device")
    is_there = device.type == NAME if device is not None else isinstance(args[0], Elsewhere) if operation in _COPIES else bool(there)
    if operation in _COPIES:
        _count(operation, args, is_there=is_there)
    held_args, held_kwargs = pytree.tree_map(_held, (args, kwargs))
    if operation is torch.ops.aten.histc.default and not held_args[0].is_floating_point():  # a GPU counts whole numbers too
        out = operation(held_args[0].double(), *held_args[1:], **held_kwargs).to(held_args[0].dtype)
    else:
        out = operation(*held_args, **held_kwargs)
    written = {id(_held(leaf)): leaf for leaf in there} if operation._schema.is_mutable else {}
    return pytree.tree_map(lambda leaf: _placed(leaf, written, is_there=is_there), out)


def _count(operation: Any, args: Any, *, is_there: bool) -> None:
    """Counts a copy between the devices. `copy_` has its target first, the others have their source first."""
    into, source = (args[0], args[1]) if operation is torch.ops.aten.copy_.default else (None, args[0])
    was_there = isinstance(source, Elsewhere)
    is_there = isinstance(into, Elsewhere) if into is not None else is_there
    if was_there and not is_there:
        crossed.to_host += source.nbytes
    elif is_there and not was_there:
        crossed.from_host += source.nbytes


def _held(leaf: Any) -> Any:
    if isinstance(leaf, Elsewhere):
        return leaf.held
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == NAME else leaf


def _placed(leaf: Any, written: dict[int, Elsewhere], *, is_there: bool) -> Any:
    """What was written in place is the tensor that was given."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, Elsewhere):
        return leaf
    return written.get(id(leaf)) if id(leaf) in written else Elsewhere(leaf) if is_there else leaf


_library, _autocast = (torch.library.Library("_", "IMPL") for _ in range(2))
"""What it registered would go with it."""
_tensor, _as_tensor = torch.tensor, torch.as_tensor
_broadcast = ProcessGroupGloo.broadcast
_to = nn.Module.to


@cache
def here() -> torch.device:
    """The device, which is registered by the first call."""
    _setup_privateuseone_for_python_backend(NAME)
    _device_constructors()  # those of torch, before two of them are replaced below
    nn.Module.to = _to_here
    _autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # it computes as if there were no autocast
    _library.fallback(lambda operation, *args, **kwargs: _compute(operation, args, kwargs), "PrivateUse1")
    torch.get_device_module(NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]
    torch.tensor, torch.as_tensor = _made_here(_tensor), _made_here(_as_tensor)
    torch.get_device_module(NAME).set_device = lambda device: crossed.chosen.append(threading.current_thread().name)
    ProcessGroupGloo.broadcast = lambda group, tensors, options: _broadcast(group, [_held(tensor) for tensor in tensors], options)
    return torch.device(NAME, 0)


def _made_here(make: Any) -> Any:
    """`torch.tensor` makes its tensor below the dispatcher: on the CPU, from where it is moved."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != NAME:
            return make(*args, device=device, **kwargs)
        return make(*args, **kwargs).to(device)

    return made


def _to_here(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`nn.Module.to` gives each place of a tied parameter a parameter of its own, where their class changes."""
    device = kwargs.get("device", args[0] if args else None)
    if isinstance(device, str | torch.device) and torch.device(device).type == NAME:
        return moved(module)
    return _to(module, *args, **kwargs)


def moved(module: nn.Module) -> nn.Module:
    """The module itself, with parameters and buffers on the second device; what shares a tensor shares it there."""
    here()
    made: dict[int, Any] = {}

    def of(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _like(tensor, Elsewhere(tensor.detach()))
        return made[id(tensor)]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = of(tensor)
    return module
