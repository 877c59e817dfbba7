"""The variable with which a chat template switches its thinking.

Most templates read ``enable_thinking``, some ``thinking`` (DeepSeek V3.1, Granite 3, Kimi K2). A
request says ``enable_thinking`` for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ENABLE_THINKING_VARIABLE = "enable_thinking"
THINKING_VARIABLE = "thinking"
_TEMPLATE_BLOCK_PATTERN = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_THINKING_VARIABLE_PATTERN = re.compile(rf"(?<![\w.]){THINKING_VARIABLE}\b(?!\s*=(?!=))")


def find_thinking_variable(template: str) -> str:
    """Return the name of the variable that a template reads."""
    if ENABLE_THINKING_VARIABLE in template:
        return ENABLE_THINKING_VARIABLE
    code = (_STRING.sub("''", block) for block in _TEMPLATE_BLOCK_PATTERN.findall(template))
    return (
        THINKING_VARIABLE
        if any(map(_THINKING_VARIABLE_PATTERN.search, code))
        else ENABLE_THINKING_VARIABLE
    )


def rename_thinking_variable(options: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Return template options under the name that the template reads; its own name wins."""
    name = find_thinking_variable(template)
    if ENABLE_THINKING_VARIABLE not in options or name == ENABLE_THINKING_VARIABLE:
        return dict(options)
    return {name: options[ENABLE_THINKING_VARIABLE], **options}
