"""The variable with which a chat template switches its thinking.

Most templates read ``enable_thinking``, some ``thinking`` (DeepSeek V3.1, Granite 3, Kimi K2). A
request says ``enable_thinking`` for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

COMMON_NAME = "enable_thinking"
OTHER_NAME = "thinking"
_CODE = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_OTHER_VARIABLE = re.compile(rf"(?<![\w.]){OTHER_NAME}\b(?!\s*=(?!=))")


def find_thinking_variable(template: str) -> str:
    """Return the name of the variable that a template reads."""
    if COMMON_NAME in template:
        return COMMON_NAME
    code = (_STRING.sub("''", block) for block in _CODE.findall(template))
    return OTHER_NAME if any(map(_OTHER_VARIABLE.search, code)) else COMMON_NAME


def rename_thinking_variable(options: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Return template options under the name that the template reads; its own name wins."""
    name = find_thinking_variable(template)
    if COMMON_NAME not in options or name == COMMON_NAME:
        return dict(options)
    return {name: options[COMMON_NAME], **options}
