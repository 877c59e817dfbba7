"""One name switches the thinking of every chat template."""

from __future__ import annotations

import pytest

from modelmill.text.thinking_switch import find_thinking_variable, rename_thinking_variable


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if enable_thinking is false %}x{% endif %}{{ thinking }}", "enable_thinking"),
        # as DeepSeek V3.1 and Granite 3.3 have it
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", "thinking"),
        ("{%- if thinking %}x{% endif %}", "thinking"),
        ("{% if thinking == true %}x{% endif %}", "thinking"),
        # another's field, a text, a name of its own, an argument
        ("{{ message.thinking }}", "enable_thinking"),
        ("{{ message['thinking'] }} and thinking {% if x == \"thinking\" %}{% endif %}",
         "enable_thinking"),
        ("{% set thinking = message.x %}", "enable_thinking"),
        ("{% set ns = namespace(thinking=false) %}{{ ns.thinking }}", "enable_thinking"),
        ("plain", "enable_thinking"),
    ],
)  # fmt: skip
def test_the_variable_of_a_template(template: str, name: str) -> None:
    assert find_thinking_variable(template) == name


def test_options_get_the_name_that_is_read() -> None:
    template = "{% if thinking %}x{% endif %}"
    options = {"enable_thinking": False}
    assert rename_thinking_variable(options, template) == {"thinking": False, **options}
    both = {"enable_thinking": False, "thinking": True}
    assert rename_thinking_variable(both, template)["thinking"] is True
    assert rename_thinking_variable(options, "{{ enable_thinking }}") == options
    assert rename_thinking_variable({}, template) == {}
