"""Moments and gradients in host memory while others have the device.

Nothing is computed with them there. They come back bit for bit.
"""

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from midflight.models.device_memory import give_back, in_host_memory
from midflight.trainer.optimizer import named_parameters


@torch.no_grad()
def park(model: nn.Module, optimizer: AdamW) -> None:
    """Moves the moments to host memory, drops the gradients, which the next step sets to zeros, and
    gives the device's memory back. Idempotent.
    """
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = in_host_memory(value)
    device = torch.device("cpu")
    for _, parameter in named_parameters(model):
        parameter.grad = None
        device = parameter.device
    give_back(device)


@torch.no_grad()
def unpark(optimizer: AdamW) -> None:
    """Moves the moments to the devices of their parameters. Idempotent."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(parameter.device)
