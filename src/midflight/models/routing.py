"""The experts that a mixture sends each token to: found in any architecture, recorded, and chosen
again.

Two programs that compute the same router in another precision, or add in another order, send some
tokens to other experts, and then differ by far more than rounding. So an engine records its choices
and the trainer repeats them: routing replay, R3 (Ma et al. 2025, 2510.11370). The weights of the
chosen experts are the trainer's own router's, so its gradient goes through them as ever (section 4
there).

Every router of `transformers` ends in one `topk` over all experts, whatever is before it (softmax,
sigmoid, biases, groups) and after it (normalisation, scaling). So that call alone is watched,
inside the modules that make it.
"""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from midflight.errors import RunFailed
from midflight.models.proof import own_forward
from midflight.types import UInt8

_TOPK: tuple[object, ...] = (torch.topk, Tensor.topk)
_PROBED = 3
"""Tokens of the forward that finds the routers."""


class Routers:
    """The modules of a model that choose experts, in the order in which a token passes them. Each
    chooses `num_chosen` of `num_experts`.
    """

    def __init__(
        self, layers: Mapping[int, nn.Module], *, num_layers: int, num_experts: int, num_chosen: int
    ) -> None:
        """`layers` by number, of `num_layers` that the model has: some may have no experts."""
        self.num_experts = num_experts
        self.num_chosen = num_chosen
        self._layers = tuple(layers)
        self._num_layers = num_layers
        self._dtype = np.dtype("u1") if num_experts <= 256 else np.dtype("<u2")
        self._chosen: dict[int, list[Tensor]] = {}
        self._given: Int[Tensor, "L N k"] | None = None
        self._records = False
        for place, module in enumerate(layers.values()):
            watch = _RouterHooks(self._on_topk, place)
            module.register_forward_pre_hook(watch.enter)
            module.register_forward_hook(watch.leave, always_call=True)

    @property
    def num_bytes(self) -> int:
        """Of a token's record."""
        return len(self._layers) * self.num_chosen * self._dtype.itemsize

    @contextmanager
    def recording(self) -> Generator[dict[int, list[Tensor]]]:
        """Forwards inside fill what is yielded: by place among the layers that have experts, those
        [N, k] of the tokens of each forward.
        """
        self._chosen = {place: [] for place in range(len(self._layers))}
        self._records = True
        try:
            yield self._chosen
        finally:
            self._records = False

    def replay(self, packed: UInt8 | None, *, device: torch.device) -> None:
        """From now on the tokens of a forward go to the experts recorded for them, [N, B]; where
        there is no record, and with None, the routers choose. It holds until the next call, because
        activations may be computed again in the backward."""
        self._given = None if packed is None else torch.from_numpy(self.unpacked(packed)).to(device)

    def packed(self, chosen: Mapping[int, Sequence[Tensor]]) -> UInt8:
        """[N, B] of what was recorded of N tokens, of one forward after the other."""
        of_layers = torch.stack(
            [torch.cat(list(of_forwards)) for of_forwards in chosen.values()], 1
        )
        return of_layers.flatten(1).cpu().numpy().astype(self._dtype).view(np.uint8)

    def unpacked(self, packed: UInt8) -> NDArray[np.int64]:
        """[L, N, k] of a record, -1 where there is none. Other people's engines have room in it for
        all layers of the model.

        `RunFailed` where it is of another model.
        """
        numbers = np.ascontiguousarray(packed).view(self._dtype).astype(np.int64)
        numbers[(packed == 255).all(1)] = -1
        whole = numbers.shape[1] == self._num_layers * self.num_chosen
        if (
            not (whole or packed.shape[1] == self.num_bytes)
            or numbers.max(initial=-1) >= self.num_experts
        ):
            raise RunFailed(
                f"the batch's record of experts has {packed.shape[1]} bytes for each token and "
                f"names expert {numbers.max(initial=-1)}; this model has {self.num_experts} "
                f"experts and needs {self.num_bytes} bytes. Sample and train with one model, or "
                "set correction.routing_replay = false."
            )
        by_layer = numbers.reshape(len(packed), -1, self.num_chosen).transpose(1, 0, 2)
        return by_layer[list(self._layers)] if whole else by_layer

    def _on_topk(self, place: int, scores: Tensor, found: Any, *, num_chosen: int) -> Any:
        if (
            scores.dim() != 2
            or scores.shape[1] != self.num_experts
            or num_chosen != self.num_chosen
        ):
            return found  # of groups of experts
        if self._given is not None:
            given = self._given[place]
            indices = torch.where(given < 0, found.indices, given)
            found = torch.return_types.topk((scores.gather(1, indices), indices))
        if self._records:
            self._chosen[place].append(found.indices)
        return found


def routers_of(model: PreTrainedModel) -> Routers | None:
    """None for a model that is no mixture, or whose layers choose in ways that differ. To be called
    before anything changes how the model attends: it makes a forward."""
    if not any("expert" in name for name in model.config.get_text_config().to_dict()):
        return None
    finder = _Finder()
    hooks = [hook for module in model.modules() for hook in finder.hooks(module)]
    try:
        with own_forward(model), torch.no_grad(), finder:
            model(
                input_ids=torch.ones(1, _PROBED, dtype=torch.int64, device=model.device),
                use_cache=False,
            )
    finally:
        for hook in hooks:
            hook.remove()
    kinds = set(finder.found.values())
    if len(kinds) != 1:
        return None
    num_experts, num_chosen = kinds.pop()
    names = {module: name for name, module in model.named_modules()}
    layers = {int(re.findall(r"\d+", names[module])[0]): module for module in finder.found}
    num_layers = model.config.get_text_config().num_hidden_layers
    return Routers(layers, num_layers=num_layers, num_experts=num_experts, num_chosen=num_chosen)


class _TopkMode(TorchFunctionMode):
    """Shows each `topk` of two dimensions and what it found to `see`, which may change it."""

    def __init__(self, see: Callable[[Tensor, Any, int], Any]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in _TOPK:
            return found
        scores = args[0] if args else kwargs["input"]
        num_chosen = args[1] if len(args) > 1 else kwargs["k"]
        return self._see(scores, found, num_chosen)


class _RouterHooks:
    """Hooks that watch one router while it runs, also where its activations are computed a second
    time.
    """

    def __init__(self, on_topk: Callable[..., Any], place: int) -> None:
        self._on_topk = on_topk
        self._place = place
        self._modes: list[_TopkMode] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        mode = _TopkMode(
            lambda scores, found, num: self._on_topk(self._place, scores, found, num_chosen=num)
        )
        self._modes.append(mode)
        mode.__enter__()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modes.pop().__exit__(None, None, None)


class _Finder(_TopkMode):
    """Notes the innermost module around each `topk`, and the most that it chooses from."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self._inside: list[nn.Module] = []
        self.found: dict[nn.Module, tuple[int, int]] = {}

    def hooks(self, module: nn.Module) -> list[Any]:
        return [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()

    def _note(self, scores: Tensor, found: Any, num_chosen: int) -> Any:
        if scores.dim() == 2 and scores.shape[0] == _PROBED and self._inside:
            known = self.found.get(self._inside[-1], (0, 0))
            self.found[self._inside[-1]] = max(known, (scores.shape[1], num_chosen))
        return found
