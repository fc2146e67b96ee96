"""Routing replay: the experts that a mixture sends each token to are recorded, and chosen again.

Two programs that compute the same router in another precision, or add in another order, send some
tokens to other experts, and then differ by far more than rounding. So an engine records its choices
and the trainer repeats them: R3 (Ma et al. 2025, 2510.11370). The weights of the chosen experts are
those of the trainer's own router, so its gradient goes through them as usual (section 4 there).

Every router of `transformers` ends in one `topk` over all experts, whatever is before it (softmax,
sigmoid, biases, groups) and after it (normalisation, scaling). So only that call is watched, inside
the modules that make it, in any architecture.
"""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
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
        """`layers` are those with experts, by number. `num_layers` counts all layers of
        the model.
        """
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
        """The bytes of a token's record."""
        return len(self._layers) * self.num_chosen * self._dtype.itemsize

    @contextmanager
    def recording(self) -> Generator[dict[int, list[Tensor]]]:
        """Records forwards inside the block. The yielded lists fill. For each layer with experts,
        by its place among them, a list gets the experts [N, k] of the tokens of each forward.
        """
        self._chosen = {place: [] for place in range(len(self._layers))}
        self._records = True
        try:
            yield self._chosen
        finally:
            self._records = False

    def replay(self, packed: UInt8 | None, *, device: torch.device) -> None:
        """Makes the tokens of forwards go to the experts recorded for them, [N, B]. Without a
        record, or with None, the routers choose. This holds until the next call, because
        activations may be computed again in the backward.
        """
        self._given = None
        if packed is not None:
            self._given = torch.from_numpy(self.unpacked(packed)).to(device)

    def packed(self, chosen: Mapping[int, Sequence[Tensor]]) -> UInt8:
        """[N, B], the records of N tokens, of one forward after the other."""
        of_layers = [torch.cat(list(of_forwards)) for of_forwards in chosen.values()]
        numbers = torch.stack(of_layers, 1).flatten(1)
        return numbers.cpu().numpy().astype(self._dtype).view(np.uint8)

    def unpacked(self, packed: UInt8) -> NDArray[np.int64]:
        """[L, N, k], the experts of a record. An entry is -1 if there is none. Other people's
        engines have room in it for all layers of the model.

        Raises `RunFailed` if the record is of another model.
        """
        numbers = np.ascontiguousarray(packed).view(self._dtype).astype(np.int64)
        numbers[(packed == 255).all(1)] = -1
        whole = numbers.shape[1] == self._num_layers * self.num_chosen
        fits = whole or packed.shape[1] == self.num_bytes
        largest = numbers.max(initial=-1)
        if not fits or largest >= self.num_experts:
            raise RunFailed(
                f"the batch's record of experts has {packed.shape[1]} bytes for each token and "
                f"names expert {largest}; this model has {self.num_experts} "
                f"experts and needs {self.num_bytes} bytes. Sample and train with one model, or "
                "set correction.routing_replay = false."
            )
        by_layer = numbers.reshape(len(packed), -1, self.num_chosen).transpose(1, 0, 2)
        return by_layer[list(self._layers)] if whole else by_layer

    def _on_topk(self, place: int, scores: Tensor, found: Any, *, num_chosen: int) -> Any:
        is_over_experts = scores.dim() == 2 and scores.shape[1] == self.num_experts
        if not is_over_experts or num_chosen != self.num_chosen:
            return found  # a choice of groups of experts
        if self._given is not None:
            given = self._given[place]
            indices = torch.where(given < 0, found.indices, given)
            found = torch.return_types.topk((scores.gather(1, indices), indices))
        if self._records:
            self._chosen[place].append(found.indices)
        return found


class RouterPlan(msgspec.Struct, frozen=True):
    """The routers of an architecture: the names of the modules that choose, by the number of their
    layer. Each chooses `num_chosen` of `num_experts`.
    """

    modules: dict[int, str]
    num_layers: int
    """All layers of the model."""
    num_experts: int
    num_chosen: int

    def routers(self, model: PreTrainedModel) -> Routers:
        """The routers of a model of this architecture."""
        named = dict(model.named_modules())
        return Routers(
            {number: named[name] for number, name in self.modules.items()},
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            num_chosen=self.num_chosen,
        )


def routers_of(model: PreTrainedModel) -> Routers | None:
    """The routers of a model. It is None if the model is no mixture, or if its layers choose in
    different ways.

    Call it before anything changes the model's attention: it makes a forward.
    """
    plan = router_plan(model)
    return None if plan is None else plan.routers(model)


def router_plan(model: PreTrainedModel) -> RouterPlan | None:
    """What `routers_of` finds, without watching the model."""
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
    modules: dict[int, str] = {}
    for module in finder.found:
        number = re.findall(r"\d+", names[module])[0]
        modules[int(number)] = names[module]
    num_layers = model.config.get_text_config().num_hidden_layers
    return RouterPlan(modules, num_layers, num_experts, num_chosen)


class _TopkMode(TorchFunctionMode):
    """Shows each `topk` and its result to `see`, which may return another result."""

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
    """Hooks that watch one router while it runs, also when its activations are computed a second
    time.
    """

    def __init__(self, on_topk: Callable[..., Any], place: int) -> None:
        self._on_topk = on_topk
        self._place = place
        self._modes: list[_TopkMode] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        mode = _TopkMode(self._see)
        self._modes.append(mode)
        mode.__enter__()

    def _see(self, scores: Tensor, found: Any, num_chosen: int) -> Any:
        return self._on_topk(self._place, scores, found, num_chosen=num_chosen)

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
            innermost = self._inside[-1]
            known = self.found.get(innermost, (0, 0))
            self.found[innermost] = max(known, (scores.shape[1], num_chosen))
        return found
