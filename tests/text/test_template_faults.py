"""Templates come from strangers: however one fails, its request is refused and nothing else happens."""

from __future__ import annotations

import pytest

from midflight.errors import ModelNotFound, RequestRejected
from midflight.text import ChatTemplate, Message
from midflight.types import Json

HI: Message = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 'x' | int(base=99) + ('%d' % 'x') }}", "TypeError"),
        ("{{ strftime_now(none) }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ 10.0 ** 400 }}", "OverflowError"),
        ("{{ [].pop() }}", "unsafe"),
        ("{{ 'abc'.index('z') }}", "ValueError"),
        ("{{ '{0}{1}'.format(1) }}", "IndexError"),
        ("{{ '{a}'.format(b=1) }}", "KeyError"),
        ("{{ messages | xmlattr }}", "AttributeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
        ("{{ 'x' * 10 ** 17 }}", "MemoryError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('\\ud800') }}", r"\?"),
    ],
)
def test_a_template_that_fails_refuses_the_messages(source: str, says: str) -> None:
    with pytest.raises(RequestRejected, match=f"chat template refused the messages: .*{says}") as caught:
        ChatTemplate(source, {}).render([HI])
    assert caught.value.param == "messages"
    str(caught.value).encode()


def test_what_a_template_says_is_cut() -> None:
    with pytest.raises(RequestRejected) as caught:
        ChatTemplate("{{ raise_exception(messages[0].content) }}", {}).render([{"role": "user", "content": "x" * 10_000}])
    assert len(str(caught.value)) < 700


def test_arguments_nested_too_deep_to_be_written_refuse_the_messages() -> None:
    deep: Json = {}
    for _ in range(100_000):
        deep = {"a": deep}
    call: Json = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
    with pytest.raises(RequestRejected, match="RecursionError"):
        ChatTemplate("{{ messages[0].tool_calls | tojson }}", {}).render([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    "source", ["{% if %}", "{% for m in messages %}" * 30 + "{% endfor %}" * 30, "{{ " + "(" * 5000 + ")" * 5000 + " }}"]
)
def test_a_template_that_cannot_be_compiled_blames_the_model_folder(source: str) -> None:
    with pytest.raises(ModelNotFound, match="compiling the chat template failed"):
        ChatTemplate(source, {})
