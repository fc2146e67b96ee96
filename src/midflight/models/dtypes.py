"""Names of dtypes: torch's, safetensors', and the configuration's."""

from __future__ import annotations

import torch

from midflight.errors import ConfigError, nearest
from midflight.models.sizes import DTYPE_NAMES

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
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name (F32, BF16, ...) of a torch dtype."""
    if dtype not in _NAMES:
        raise ConfigError(f"tensors of {dtype} cannot be published; convert the model to float32 or bfloat16.")
    return _NAMES[dtype]


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a configured name (`float32`, `bfloat16`, ...), or of a safetensors name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = DTYPE_NAMES.get(dtype, dtype)
    if name not in TORCH_DTYPES:
        raise ConfigError(f"model.dtype {dtype!r} is unknown.{nearest(dtype, DTYPE_NAMES)}")
    return TORCH_DTYPES[name]
