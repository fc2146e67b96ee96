"""Between text and tokens: tokenizer, chat template, incremental detokenisation, stop strings. Knows no station and no torch."""

from midflight.text.detokenizer import IncrementalDetokenizer, StopMatch, StopMatcher
from midflight.text.tokenizer import ChatTemplate, Message, Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Message", "StopMatch", "StopMatcher", "Tokenizer"]
