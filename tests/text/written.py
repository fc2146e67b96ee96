"""Models of several families, as far as their text goes: byte tokenizers with their special tokens, and templates in their style."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken

from midflight.text import ChatTemplate, Tokenizer
from midflight.text.byte_tokenizer import END, byte_tokenizer
from midflight.text.formats import Tool

QWEN = (
    "{%- if tools %}{{- '<|system|>Functions:' }}{%- for tool in tools %}{{- '\\n' ~ tool | tojson }}{%- endfor %}{{- '<|end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{{- '<|' ~ m.role ~ '|>' }}"
    "{%- if m.reasoning_content %}{{- '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- m.content }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '\\n<tool_call>\\n{\"name\": \"' ~ call.function.name ~ '\", \"arguments\": ' ~ call.function.arguments | tojson ~ '}\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
LLAMA = (
    "{%- for m in messages %}"
    "{%- if m.tool_calls %}"
    "{{- '<|assistant|>{\"name\": \"' ~ m.tool_calls[0].function.name ~ '\", \"parameters\": ' ~ m.tool_calls[0].function.arguments | tojson ~ '}' }}"
    "{%- elif m.code %}{{- '<|python_tag|>' ~ m.code }}"
    "{%- else %}{{- '<|' ~ m.role ~ '|>' ~ m.content }}{%- endif %}{{- '<|end|>' }}"
    "{%- endfor %}"
)
MISTRAL = (
    "{%- for m in messages %}"
    "{%- if m.tool_calls %}{{- '[TOOL_CALLS][' }}"
    "{%- for call in m.tool_calls %}"
    '{{- \'{"name": "\' ~ call.function.name ~ \'", "arguments": \' ~ call.function.arguments | tojson ~ \', "id": "\' ~ call.id ~ \'"}\' }}'
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}"
    "{%- endfor %}{{- ']' }}"
    "{%- elif m.role == 'tool' %}{{- m.name ~ ' ' ~ m.tool_call_id ~ ': ' ~ m.content }}"
    "{%- else %}{{- m.content }}{%- endif %}"
    "{%- endfor %}"
)
MISTRAL_NAMED = (
    "{%- for m in messages %}{{- '[THINK]' ~ (m.thinking or '') ~ '[/THINK]' ~ m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '[TOOL_CALLS]' ~ call.function.name ~ '[ARGS]' ~ call.function.arguments | tojson }}{%- endfor %}"
    "{%- endfor %}"
)
CODER = (
    "{%- for m in messages %}{{- m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}"
    "{%- for key, value in call.function.arguments | items %}{{- '<parameter=' ~ key ~ '>\\n' ~ value ~ '\\n</parameter>\\n' }}{%- endfor %}"
    "{{- '</function>\\n</tool_call>' }}{%- endfor %}"
    "{%- endfor %}"
)
R1 = "{%- for m in messages %}{{- m.content.split('</think>')[-1] }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}{%- endif %}"
PLAIN = "{%- for m in messages %}{{- m.content }}{%- endfor %}"


def model(template: str | None = None, special: Sequence[str] = (), *, added: Sequence[str] = ()) -> Tokenizer:
    """`added`: tokens of their own that are not special."""
    backend = byte_tokenizer()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return Tokenizer(backend, template=None if template is None else ChatTemplate(template, {}), eos_token_ids=frozenset({END}))


WEATHER = Tool(
    "weather",
    "The weather somewhere.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer"},
            "at": {"$ref": "#/$defs/place"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {
            "place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False},
        },
    },
)
CLOCK = Tool("clock")
