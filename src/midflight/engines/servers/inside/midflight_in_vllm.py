"""Runs inside vLLM, in each of its processes. This plugin lets an answer go on in the middle of a
grammar, and makes each piece of an answer say which weights made which token.

vLLM finds it by the entry point beside it. The plugin replaces only how the grammar of a request is
made, and only for requests that say `midflight`. The rest of vLLM's machinery of structured outputs
stays: vLLM decides when masks are made, moved and applied.
"""

from functools import wraps

import midflight_needs  # noqa: F401 (it checks what vLLM must have, before that is imported)
from llguidance.torch import fill_next_token_bitmask
from midflight_shape import Shapes
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar


class VllmShape(StructuredOutputGrammar):
    """A `Shape` in vLLM's words."""

    def __init__(self, shape):
        self._shape = shape

    def accept_tokens(self, request_id, tokens):
        return self._shape.accept(tokens)

    def validate_tokens(self, tokens):
        return tokens[: self._shape.num_allowed(tokens)]

    def rollback(self, num_tokens):
        self._shape.back(num_tokens)

    def fill_bitmask(self, bitmask, batch_index):
        self._shape.fill(
            bitmask[batch_index],
            lambda matcher: fill_next_token_bitmask(matcher, bitmask, batch_index),
        )

    def is_terminated(self):
        return self._shape.ended

    def reset(self):
        self._shape.back(self._shape.num_tokens)


def register():
    """Called by vLLM at the start of each process."""
    made_before = StructuredOutputManager._create_grammar

    @wraps(made_before)
    def made(self, request):
        said = (request.sampling_params.extra_args or {}).get("midflight")
        if said is None:
            return made_before(self, request)
        if not hasattr(self, "midflight_shapes"):
            # vLLM's own backend sizes its rows so.
            size = max(self.vllm_config.model_config.get_vocab_size(), len(self.tokenizer))
            self.midflight_shapes = Shapes(self.tokenizer, size)
        return VllmShape(self.midflight_shapes.shape(said))

    StructuredOutputManager._create_grammar = made
    RequestState._new_completion_output = _with_versions(RequestState._new_completion_output)


def _with_versions(made_before):
    """Makes pieces of answers that say which weights made which token. vLLM by itself says it with
    the last one only. Its answer that it has new weights may overtake the pieces.
    """

    @wraps(made_before)
    def made(self, *given, **named):
        piece = made_before(self, *given, **named)
        if piece.weight_versions is None:
            piece.weight_versions = self._weight_version_spans()
        return piece

    return made
