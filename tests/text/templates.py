"""Chat templates in the ways in which models write theirs, for tests that a template goes on as it writes the whole."""

from __future__ import annotations

from collections.abc import Mapping

_CALLS = (
    "{%- for call in message.tool_calls or [] %}"
    "{{- '\\n<tool_call>\\n' }}{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{- '\\n</tool_call>' }}"
    "{%- endfor %}"
)

CHATML = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}"
    "{{- '<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\nHelp.<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\\n' + message.content }}" + _CALLS + "{{- '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Groups results of tools by looking at the neighbours."""

LLAMA = (
    "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b') %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}"
    "{%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
    "{%- else %}{%- set system_message = '' %}{%- endif %}"
    "{{- bos_token + '<|im_start|>system\\n' + date_string + system_message + '<|im_end|>' }}"
    "{%- for message in messages %}"
    "{%- if message.tool_calls %}{{- '<|im_start|>assistant\\n' + message.content }}" + _CALLS + "{{- '<|im_end|>' }}"
    "{%- else %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Takes the system message off the conversation, and writes a date before it."""

QWEN = (
    "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages | length - 1) %}"
    "{%- for message in messages[::-1] %}"
    "{%- set index = (messages | length - 1) - loop.index0 %}"
    "{%- if ns.multi_step_tool and message.role == 'user' and message.content is string"
    " and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}"
    "{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role in ('user', 'system') %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- set content = message.content %}{%- set reasoning_content = '' %}"
    "{%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}"
    "{%- if loop.index0 > ns.last_query_index %}"
    "{%- if loop.last or (not loop.last and reasoning_content) %}"
    "{{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}" + _CALLS + "{{- '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
"""Looks for the last question from the end, and cuts the thoughts before it."""

MISTRAL = (
    "{%- set ns = namespace(index=0, said='') %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.index = ns.index + 1 %}{{- '<|im_start|>' + ns.index | string + ns.said + '\\n' }}"
    "{%- set ns.said = message.content %}{{- message.content + '<|im_end|>' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + ('' if message.role == 'assistant' else loop.index | string) + '\\n' + (message.content or '') }}"
    + _CALLS
    + "{{- '<|im_end|>' }}"
    "{%- if loop.previtem and loop.previtem.role == 'tool' %}{{- 'then ' }}{%- endif %}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Carries a count and a text from message to message."""

PROMPTING = (
    "{%- macro turn(role, text) %}{{- '<|im_start|>' + role + '\\n' + text + '<|im_end|>' }}{%- endmacro %}"
    "{%- for message in messages %}"
    "{{- turn(message.role, message.content or '') }}"
    + _CALLS
    + "{%- if loop.last and add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    "{%- endfor %}"
)
"""Writes the generation prompt in its loop, and messages by a macro."""

COUNTING = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + (loop.length | string if loop.index0 > 1 else '') + '\\n' + (message.content or '') + '<|im_end|>' }}"
    + _CALLS
    + "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Writes the length of the conversation into each message."""

DATING = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + strftime_now('%Y') + '\\n' + (message.content or '') + '<|im_end|>' }}" + _CALLS + "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Writes the date into each message."""

ENDING = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'user' and message == messages[-1] %}{{- 'last: ' }}{%- endif %}"
    "{{- (message.content or '') + '<|im_end|>' }}" + _CALLS + "{%- endfor %}"
    "{{- messages | map(attribute='role') | join(',') }}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Compares each message with the last one, and lists the roles at the end."""

TEMPLATES: Mapping[str, str] = {
    "chatml with tools": CHATML,
    "llama": LLAMA,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "prompts at the end": PROMPTING,
    "counts": COUNTING,
    "dates": DATING,
    "looks at the end": ENDING,
}
