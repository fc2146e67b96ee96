"""The tensors of a model by name: reading them, replacing all of them at once, and the names of
their dtypes in torch, safetensors and the configuration.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from midflight.errors import ConfigError, WeightsCorrupt, nearest
from midflight.models.adapters import adapter_name
from midflight.models.sizes import DTYPE_NAMES
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
    """The tensors that are handed over to engines, by their names in files, in the model's own
    order. They are detached, and share the model's storage.

    They are parameters and persistent buffers. If the model has adapters (`models.lora`), they are
    the adapters only. Tied weights appear once, under their first name. If `transformers` fuses
    tensors of the checkpoint in memory (experts of mixtures), the names are those in memory;
    `conversion` has those of files.
    """
    return {name: tensor.detach() for name, tensor in _targets(model).items()}


def in_dtype(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating-point tensors in `dtype`, copied only where they are in another; other tensors as
    they are.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            found[name] = tensor.to(dtype)
    return found


def outlines(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Names and shapes of the tensors as `in_dtype` would make them, without their numbers: on the
    meta device.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        served = dtype if tensor.is_floating_point() else tensor.dtype
        found[name] = torch.empty(tensor.shape, dtype=served, device="meta")
    return found


@torch.no_grad()
def assign(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Makes `tensors` the weights of `model`: all or none (I7). Names are those of `named_tensors`.

    If dtype and device agree, nothing is copied: the model then lives in the given storage, which
    must stay untouched. Other tensors are converted into new storage. Tied weights stay tied.
    Raises `WeightsCorrupt` if a tensor does not fit. It names the first one. Returns the replaced
    tensors. If a swap must be short, drop them later, because giving back their memory takes longer
    than the swap.
    """
    targets = _targets(model)
    _check(targets, tensors, model)
    replaced = {name: target.detach() for name, target in targets.items()}
    for name, target in targets.items():
        target.data = tensors[name].detach().to(device=target.device, dtype=target.dtype)
    return replaced


def as_tensors(specs: Iterable[TensorSpec], views: Mapping[str, memoryview]) -> dict[str, Tensor]:
    """Tensors over the given bytes, without copying: they live as long as the views do. The views
    must be writable memory; views of one memory become tensors of one storage.
    """
    memories = {
        id(view.obj): torch.frombuffer(view.obj, dtype=torch.uint8)
        for view in views.values()
        if view.nbytes
    }
    tensors: dict[str, Tensor] = {}
    for spec in specs:
        view = views[spec.name]
        memory = memories.get(id(view.obj), _NOTHING)
        tensors[spec.name] = _tensor(spec, view, memory)
    return tensors


def as_bytes(tensors: Mapping[str, Tensor]) -> Iterator[tuple[TensorSpec, memoryview]]:
    """The spec of each tensor, at offset 0, and its bytes. They are its own memory if it lies in
    one piece, else a copy.
    """
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        spec = TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape), 0, flat.numel())
        yield spec, flat.numpy().data


def _tensor(spec: TensorSpec, view: memoryview, memory: Tensor) -> Tensor:
    dtype = TORCH_DTYPES[spec.dtype]
    if spec.num_bytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    tensor = torch.frombuffer(view, dtype=dtype)
    offset = tensor.data_ptr() - memory.data_ptr()
    if offset % dtype.itemsize:  # another program made it; our tensors are aligned
        return tensor.reshape(spec.shape)
    return memory[offset : offset + spec.num_bytes].view(dtype).reshape(spec.shape)


def _targets(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers themselves of `named_tensors`."""
    everything = model.state_dict(keep_vars=True)
    adapters: dict[str, Tensor] = {}
    for name, tensor in everything.items():
        renamed = adapter_name(name)
        if renamed is not None:
            adapters[renamed] = tensor
    if adapters:
        return adapters
    first: dict[int, str] = {}
    for name, tensor in everything.items():
        first.setdefault(id(tensor), name)
    return {name: everything[name] for name in first.values()}


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
        hint = "the model has no such tensor"
        if name in model.state_dict():
            hint = "it is tied to another tensor and must not be sent"
        raise WeightsCorrupt(
            f"assigning weights: tensor {name!r} is unexpected: {hint}; trainer and engine must "
            "load the same model."
        )
