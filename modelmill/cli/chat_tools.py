"""Tools of a chat in the terminal: their definitions, and the results that the user gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelmill.core.errors import UsageError
from modelmill.text.answer_pieces import ParsedToolCall, make_openai_tool_call

TOOLS_FILE_EXAMPLE = '[{"type": "function", "function": {"name": "weather", "parameters": {…}}}]'


def read_tool_definitions(file: Path) -> tuple[Mapping[str, Any], ...]:
    """Read a JSON file of tool definitions in OpenAI's form.

    Raises:
        UsageError: it cannot be read, or is no such list.
    """
    try:
        tools = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except (UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"{file} is not JSON: {error}") from None
    if isinstance(tools, dict) and isinstance(tools.get("tools"), list):
        tools = tools["tools"]
    if not isinstance(tools, list) or not tools:
        raise UsageError(f"{file} holds no list of tools; write {TOOLS_FILE_EXAMPLE}")
    for number, tool in enumerate(tools):
        _check_tool_definition(tool, f"{file}: tools[{number}]")
    names = [tool["function"]["name"] for tool in tools]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise UsageError(f"{file}: two tools are named {double}; rename one")
    return tuple(tools)


def _check_tool_definition(tool: Any, where: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise UsageError(f"{where} is no function; write {TOOLS_FILE_EXAMPLE}")
    if not isinstance(function.get("name"), str) or not function["name"].strip():
        raise UsageError(f"{where} has no name; write {TOOLS_FILE_EXAMPLE}")
    if not isinstance(function.get("parameters", {}), dict):
        raise UsageError(f"{where}: parameters must be a JSON schema; write {TOOLS_FILE_EXAMPLE}")


def format_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """One line for each tool: its name, its parameters and what it does."""
    lines = []
    for tool in tools:
        function = tool["function"]
        names = ", ".join((function.get("parameters") or {}).get("properties") or {})
        about = function.get("description")
        lines.append(f"{function['name']}({names})" + (f": {about}" if about else ""))
    return "\n".join(lines) or "(none)"


def format_call(call: ParsedToolCall) -> str:
    """A call as a line."""
    return f"[call] {call.name}({call.arguments})"


def make_call_message(content: str, calls: Sequence[ParsedToolCall]) -> dict[str, Any]:
    """The answer's message with its calls, in OpenAI's form."""
    written = [make_openai_tool_call(call.id, call.name, call.arguments) for call in calls]
    return {"role": "assistant", "content": content, "tool_calls": written}


def ask_tool_results(
    calls: Sequence[ParsedToolCall],
    read_line: Callable[[str], str | None],
    complain: Callable[[str], None],
) -> list[dict[str, Any]] | None:
    """Ask for the result of each call; ``@FILE`` is the text of a file.

    Nothing is ever run: what a call does is up to the user.

    Args:
        calls: of the answer.
        read_line: reads a message after a prompt; None at the end of the input.
        complain: shows why a file cannot be read; the result is asked for again.

    Returns:
        The messages with the results; None if the user left one out.
    """
    messages = []
    for call in calls:
        text = _read_tool_result(f"{call.name}= ", read_line, complain)
        if text is None:
            return None
        messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return messages


def _read_tool_result(
    prompt: str, read_line: Callable[[str], str | None], complain: Callable[[str], None]
) -> str | None:
    while True:
        line = read_line(prompt)
        if line is None or not line.strip():
            return None
        if not line.startswith("@"):
            return line
        file = Path(line[1:].strip()).expanduser()
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            complain(f"cannot read {file}: {getattr(error, 'strerror', None) or 'it is no text'}")
