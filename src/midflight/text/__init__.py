"""The conversion between text and tokens: tokenizer, chat template, incremental detokenisation,
stop strings. It imports no station and no torch.
"""

from midflight.text.detokenizer import IncrementalDetokenizer, StopMatch, StopMatcher
from midflight.text.tokenizer import ChatTemplate, Ending, Message, Tokenizer

__all__ = [
    "ChatTemplate",
    "Ending",
    "IncrementalDetokenizer",
    "Message",
    "StopMatch",
    "StopMatcher",
    "Tokenizer",
]
