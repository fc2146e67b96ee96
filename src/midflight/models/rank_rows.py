"""The rows of a tensor that a trainer rank has, of a tensor that FSDP2 shares over ranks by rows."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from midflight.errors import ConfigError


def own_rows(tensor: DTensor, name: str) -> tuple[Tensor, int]:
    """This rank's rows, and the number of the first. Ranks have equal numbers of rows, except the
    last ranks, which have fewer or none. In the whole tensor's memory a rank's rows lie in one
    piece.

    Raises `ConfigError` if the tensor is shared in another way.
    """
    first, _ = rows_of(tensor, name, tensor.device_mesh.get_local_rank())
    return tensor.to_local(), first


def rows_of(tensor: DTensor, name: str, rank: int) -> tuple[int, int]:
    """The first row of a rank, and the row after its last. Both are equal if it has none."""
    placement = tensor.placements[0]
    if not isinstance(placement, Shard) or placement.dim != 0 or tensor.device_mesh.ndim != 1:
        raise ConfigError(
            f"handing {name!r} over: ranks have it as {tensor.placements}, not by rows; set "
            "trainer.ranks = 1."
        )
    num_rows = tensor.shape[0]
    each = -(-num_rows // tensor.device_mesh.size())
    return min(rank * each, num_rows), min((rank + 1) * each, num_rows)
