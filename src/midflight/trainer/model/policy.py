"""A causal language model as the trainer uses it. Only this module meets the architecture."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from midflight.errors import RunFailed
from midflight.models.proof import forget_lengths
from midflight.models.routing import RouterPlan, router_plan
from midflight.trainer.model.attention import Runs, attend_raggedly, packed_runs
from midflight.trainer.model.layers import unpack_mixers
from midflight.trainer.model.microbatch import Layout, MicroBatch
from midflight.trainer.model.scores import token_scores
from midflight.types import PackedBatch

Scores = tuple[Float[Tensor, " k"], "Float[Tensor, ' k'] | None"]


class TokenModel(nn.Module):
    """A decoder that gives a number for each prediction of a micro-batch. Its parameters are those
    of `model`, under `model.`
    """

    def __init__(self, model: PreTrainedModel, layout: Layout = Layout.PACKED) -> None:
        super().__init__()
        self.layout = layout
        if layout is Layout.PACKED:
            attend_raggedly(model)
            unpack_mixers(model)
        # No dropout: the log-probabilities must be those of the distribution that an engine
        # samples.
        model.eval()
        self.model = model

    def forward(
        self, micro: MicroBatch, *, temperature: float, with_entropy: bool = False
    ) -> Scores:
        """A number for each prediction, from the state before its token."""
        raise NotImplementedError

    def _hidden(self, micro: MicroBatch) -> Float[Tensor, "k H"]:
        with packed_runs(micro.runs):
            found = self.model.base_model(**self._read(micro))
        hidden: Tensor = found.last_hidden_state.flatten(0, 1)[micro.inputs]
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            return hidden.to(torch.get_autocast_dtype(kind))
        return hidden

    def _read(self, micro: MicroBatch) -> dict[str, Any]:
        """The arguments of the model's forward. Packed rows have their positions, others their
        padding, if there is any.
        """
        if self.layout is Layout.EQUAL:
            forget_lengths(self.model)
        given: dict[str, Any] = {"input_ids": micro.input_ids, "use_cache": False}
        if micro.position_ids is not None:
            given["position_ids"] = micro.position_ids
        if micro.attention_mask is not None:
            given["attention_mask"] = micro.attention_mask
        return given


class TriedOut(msgspec.Struct, frozen=True):
    """What a forward of a few tokens says of an architecture."""

    has_plain_head: bool
    routers: RouterPlan | None = None
    """Those that replay the choices of an engine, if there are any."""


def try_out(model: PreTrainedModel, *, replays: bool = False) -> TriedOut:
    """Makes a forward of a few tokens. With `replays` the routers of a mixture are wanted."""
    return TriedOut(has_plain_head(model), router_plan(model) if replays else None)


class Policy(TokenModel):
    """Gives the log-probability of tokens instead of logits."""

    def __init__(
        self,
        model: PreTrainedModel,
        layout: Layout = Layout.PACKED,
        *,
        replays: bool = False,
        tried: TriedOut | None = None,
    ) -> None:
        """With `replays`, tokens of a mixture go to the experts that an engine recorded. A model
        without numbers cannot be tried out here, and needs what another process has `tried`.
        """
        tried = tried or try_out(model, replays=replays)
        super().__init__(model, layout)
        self.has_plain_head = tried.has_plain_head
        self.routers = None if tried.routers is None else tried.routers.routers(model)

    def forward(
        self, micro: MicroBatch, *, temperature: float, with_entropy: bool = False
    ) -> Scores:
        """log softmax(logits / temperature) of each target, in float32 (float64 for a float64
        model), and the entropy in nats if asked.

        With the temperature of sampling and no truncation this is the distribution an engine
        samples from. Logits are made where a prediction is wanted and nowhere else, a few at a
        time; an architecture that does more to them than a linear layer makes all.
        """
        if self.routers is not None:
            self.routers.replay(micro.experts, device=micro.input_ids.device)
        if self.has_plain_head:
            return self._by_plain_head(micro, temperature=temperature, with_entropy=with_entropy)
        logits = self._logits(micro)
        precise = logits if logits.dtype == torch.float64 else logits.float()
        z = precise / temperature
        if micro.kept is not None:
            z = micro.kept.cut(z)
        table = z.log_softmax(-1)
        entropy = -(table.exp() * table).sum(-1) if with_entropy else None
        return table.gather(-1, micro.targets[:, None]).squeeze(-1), entropy

    def _by_plain_head(
        self, micro: MicroBatch, *, temperature: float, with_entropy: bool
    ) -> Scores:
        layer = cast(nn.Linear, self.model.get_output_embeddings())
        hidden = self._hidden(micro)
        return token_scores(
            hidden,
            layer.weight.to(hidden.dtype),
            cast("Tensor | None", layer.bias),
            micro.targets,
            temperature=temperature,
            with_entropy=with_entropy,
            kept=micro.kept,
        )

    def _logits(self, micro: MicroBatch) -> Float[Tensor, "k V"]:
        if micro.runs is None:  # rows keep different predictions, so all logits are made
            return self.model(**self._read(micro)).logits.flatten(0, 1)[micro.inputs]
        with packed_runs(micro.runs):
            return self.model(**self._read(micro), logits_to_keep=micro.inputs).logits[0]


def check_fits(batch: PackedBatch, model: PreTrainedModel) -> None:
    """Raises `RunFailed` if the batch holds tokens or positions that the model has not got: it was
    sampled from another model.
    """
    size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    ids = batch.token_ids
    unknown = ids[(ids < 0) | (ids >= size)]
    if len(unknown):
        raise RunFailed(
            f"the batch holds token {unknown[0]}, and the model's vocabulary ends at {size - 1}. "
            "Sample and train with one model and tokenizer."
        )
    longest = int(np.diff(batch.row_offsets).max(initial=0))
    context = _longest_context(model)
    if context is not None and longest > context:
        raise RunFailed(
            f"the batch holds a row of {longest} tokens, and the model's context is {context}. "
            "Lower the environment's lengths, or the engine's context."
        )


def _longest_context(model: PreTrainedModel) -> int | None:
    """The most tokens that the configuration can be read to allow; None if it has no such number.

    Some configurations include the stretch of rotary positions in this number, some do not.
    """
    config: Any = model.config.get_text_config()
    context: int | None = getattr(config, "max_position_embeddings", None)
    if context is None:
        return None
    rotary = getattr(config, "rope_parameters", None) or {}
    stretch = rotary.get("factor") or 1
    return int(context * max(1, stretch))


@torch.no_grad()
def has_plain_head(model: PreTrainedModel) -> bool:
    """True if logits are one linear layer on the last hidden states, and nothing is scaled or
    capped after it. This is tried out on three tokens.
    """
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear or model.base_model is model:
        return False
    device = layer.weight.device
    ids = torch.tensor([[1, 2, 3]], device=device)
    with packed_runs(Runs.of_one(3)):
        hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    if hidden.shape[-1] != layer.in_features:
        return False
    ours = nn.functional.linear(hidden, layer.weight, layer.bias)
    return torch.allclose(ours, logits, rtol=1e-3, atol=1e-5)
