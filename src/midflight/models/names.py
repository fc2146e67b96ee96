"""The tensors of a model by name, replacing all of them at once, and the names of their dtypes:
torch's, safetensors', and the configuration's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from midflight.errors import ConfigError, WeightsCorrupt, nearest
from midflight.models.sizes import DTYPE_NAMES, adapter_name
from midflight.types import TensorSpec

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NOTHING = torch.empty(0, dtype=torch.uint8)
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name (F32, BF16, ...) of a torch dtype."""
    if dtype not in _NAMES:
        raise ConfigError(
            f"tensors of {dtype} cannot be published; convert the model to float32 or bfloat16."
        )
    return _NAMES[dtype]


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a configured name (`float32`, `bfloat16`, ...), or of a safetensors
    name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    name = DTYPE_NAMES.get(dtype, dtype)
    if name not in TORCH_DTYPES:
        raise ConfigError(f"model.dtype {dtype!r} is unknown.{nearest(dtype, DTYPE_NAMES)}")
    return TORCH_DTYPES[name]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What is handed over, by the name in files, in the model's own order, detached; it shares the
    model's storage.

    These are parameters and persistent buffers; of a model with adapters (`models.load`) the
    adapters only. Tied weights appear once, under their first name. Where `transformers` fuses
    tensors of the checkpoint in memory (experts of mixtures), the names are those in memory;
    `conversion` has those of files.
    """
    return {name: tensor.detach() for name, tensor in _targets(model).items()}


def in_dtype(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating-point tensors in `dtype`, copied only where they are in another; the others as they
    are.
    """
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


@torch.no_grad()
def assign(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Makes `tensors` the weights of `model`: all or none (I7). Names are those of `named_tensors`.

    Where dtype and device agree nothing is copied: the model then lives in the given storage, which
    must stay untouched; else the tensor is converted into new storage. Tied weights stay tied.
    `WeightsCorrupt` names the first tensor that does not fit. Returns the tensors replaced: where a
    swap must be short, drop them later, for giving back their memory takes longer than it.
    """
    targets = _targets(model)
    _check(targets, tensors, model)
    replaced = {name: target.detach() for name, target in targets.items()}
    for name, target in targets.items():
        target.data = tensors[name].detach().to(device=target.device, dtype=target.dtype)
    return replaced


def as_tensors(specs: Iterable[TensorSpec], views: Mapping[str, memoryview]) -> dict[str, Tensor]:
    """Tensors over the given bytes, without copying: they live as long as the views do. The views
    must be writable memory; those of one memory become tensors of one storage."""
    memories = {
        id(view.obj): torch.frombuffer(view.obj, dtype=torch.uint8)
        for view in views.values()
        if view.nbytes
    }
    return {
        s.name: _tensor(s, views[s.name], memories.get(id(views[s.name].obj), _NOTHING))
        for s in specs
    }


def as_bytes(tensors: Mapping[str, Tensor]) -> Iterator[tuple[TensorSpec, memoryview]]:
    """Of each tensor its spec, at offset 0, and its bytes: its own memory where it lies in one
    piece, else a copy.
    """
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield (
            TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape), 0, flat.numel()),
            flat.numpy().data,
        )


def side_by_side(tensors: Sequence[Tensor], *, turned: bool = False) -> Tensor | None:
    """The tensors as one along their first dimension, without copying; `None` where they do not lie
    so in one storage: one after the other, or `turned`, when each is a stretch of the columns of
    one matrix in memory."""
    first = tensors[0]
    end = tensors[0].data_ptr()
    num = sum(map(len, tensors))
    for tensor in tensors:
        lies_so = tensor.stride() == (1, num) if turned else tensor.is_contiguous()
        if (
            not lies_so
            or tensor.data_ptr() != end
            or tensor.dtype != first.dtype
            or tensor.shape[1:] != first.shape[1:]
        ):
            return None
        if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += len(tensor) * tensor.itemsize if turned else tensor.nbytes
    return first.as_strided((num, *first.shape[1:]), first.stride())


def put_together(tensors: Sequence[Tensor], *, turned: bool = False) -> Sequence[Tensor]:
    """The same tensors side by side in one storage, which is new unless they lie so. See
    `side_by_side`.
    """
    if side_by_side(tensors, turned=turned) is not None:
        return tensors
    whole = (
        torch.cat([tensor.t() for tensor in tensors], 1).t() if turned else torch.cat(list(tensors))
    )
    return whole.split([len(tensor) for tensor in tensors])


def _tensor(spec: TensorSpec, view: memoryview, memory: Tensor) -> Tensor:
    dtype = TORCH_DTYPES[spec.dtype]
    if spec.num_bytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    tensor = torch.frombuffer(view, dtype=dtype)
    offset = tensor.data_ptr() - memory.data_ptr()
    if offset % dtype.itemsize:  # not of ours, which are aligned
        return tensor.reshape(spec.shape)
    return memory[offset : offset + spec.num_bytes].view(dtype).reshape(spec.shape)


def _targets(model: nn.Module) -> dict[str, Tensor]:
    """As `named_tensors`, but the parameters and buffers themselves."""
    everything = model.state_dict(keep_vars=True)
    adapters = {
        renamed: tensor for name, tensor in everything.items() if (renamed := adapter_name(name))
    }
    first: dict[int, str] = {}
    for name, tensor in everything.items():
        first.setdefault(id(tensor), name)
    return adapters or {name: everything[name] for name in first.values()}


def _check(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    for name, target in targets.items():
        if name not in tensors:
            raise WeightsCorrupt(
                f"assigning weights: tensor {name!r} is missing; publish every tensor of the model."
            )
        if tensors[name].shape != target.shape:
            raise WeightsCorrupt(
                f"assigning weights: tensor {name!r} has shape {tuple(tensors[name].shape)}, the "
                f"model needs {tuple(target.shape)}; trainer and engine must load the same model."
            )
    for name in tensors.keys() - targets.keys():
        hint = (
            "it is tied to another tensor and must not be sent"
            if name in model.state_dict()
            else "the model has no such tensor"
        )
        raise WeightsCorrupt(
            f"assigning weights: tensor {name!r} is unexpected: {hint}; trainer and engine must "
            "load the same model."
        )
