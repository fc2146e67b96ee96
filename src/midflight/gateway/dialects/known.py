"""Fields that clients send and that are not read: harmless ones, and those with one value that says nothing."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

HARMLESS: Mapping[str, str] = {
    "user": "names the client's own user",
    "safety_identifier": "names the client's own user",
    "metadata": "the client's own labels",
    "store": "nothing is stored beyond the session",
    "prompt_cache_key": "engines find common prefixes by themselves",
    "prompt_cache_retention": "engines find common prefixes by themselves",
    "service_tier": "there is one tier",
    "parallel_tool_calls": "says nothing where no tools are given",
    "prediction": "a hint for speed",
}
"""Accepted and ignored, with the reason: they do not change which tokens are sampled."""

NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "length_penalty": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "prompt_logprobs": (0,),
    "bad_words": ([],),
    "priority": (0,),
}
"""Known fields with the values that say nothing; any other value would be a promise that is not kept."""

REMEDIES: Mapping[str, str] = {
    "functions": "send `tools` instead",
    "function_call": "send `tool_choice` instead",
    "echo": "the log-probabilities of a prompt are not known here; score it with the trainer's model",
    "suffix": "write the text to fill in into the prompt, as the model's format for it demands",
    "audio": "answers are text",
    "modalities": "answers are text",
    "web_search_options": "give the model a tool of your own that searches",
    "verbosity": "ask for short or long answers in the messages",
}
"""What to do instead of a field that is refused, where there is something."""
