"""Memory of a device that a process gives to others for a time."""

import torch
from torch import Tensor


def in_host_memory(tensor: Tensor) -> Tensor:
    """A copy of the tensor in the machine's own memory, from which a GPU reads it as fast as it can
    (pinned). A tensor that is there already is returned as it is.
    """
    if tensor.device.type != "cuda" or type(tensor) is not Tensor:
        return tensor.detach().to("cpu")
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor.detach())


def give_back(device: torch.device) -> None:
    """Gives the memory that torch keeps for later tensors back to the device, so that another
    process can take it. Does nothing on a CPU.
    """
    if device.type == "cpu":
        return
    empty = getattr(torch.get_device_module(device), "empty_cache", None)
    if empty is not None:
        empty()
