"""Under which name a model takes, and gives back, what it keeps of a sequence."""

import inspect

from transformers import PreTrainedModel

NAMES = ("cache", "past_key_values", "cache_params", "state")
"""The first is that of `transformers` 5.24 and later, which also takes the second and the third,
with a warning, until 5.40. RWKV has the last.
"""


def cache_name(model: PreTrainedModel) -> str | None:
    """The parameter of the model's forward, and the field of what it returns. None where the model
    keeps nothing.
    """
    takes = inspect.signature(type(model).forward).parameters
    return next((name for name in NAMES if name in takes), None)
