"""The name under which a model takes and returns the cache of a sequence."""

import inspect

from transformers import PreTrainedModel

NAMES = ("cache", "past_key_values", "cache_params", "state")
"""`transformers` 5.24 and later has the first name, and also takes the second and the third, with a
warning, until 5.40. RWKV has the last.
"""


def cache_name(model: PreTrainedModel) -> str | None:
    """The name of the cache: a parameter of the model's forward and a field of its result. It is
    None if the model keeps nothing.
    """
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in NAMES if name in parameters), None)
