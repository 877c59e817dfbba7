"""Plain records that stand for the peers' protocol classes in their tests."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any, Self

from tools.peer_parsers.peer_parser import PeerInternalError

_NUMBERS = itertools.count()


class Record:
    """Fields by name; a class names its defaults, and the classes of its fields in ``nested``."""

    nested: dict[str, type] = {}  # noqa: RUF012
    defaults: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, *positional: Any, **fields: Any) -> None:
        if positional:
            raise PeerInternalError("a protocol class with positional fields")
        for name, value in {**self.defaults, **fields}.items():
            setattr(self, name, self._field(name, value))

    def __getattr__(self, name: str) -> Any:
        """Refuse a field that no test of calls or content needs."""
        raise PeerInternalError(name)

    @classmethod
    def _field(cls, name: str, value: Any) -> Any:
        nested = cls.nested.get(name)
        if isinstance(value, list):
            return [cls._field(name, each) for each in value]
        return nested(**value) if nested is not None and isinstance(value, dict) else value

    def __eq__(self, other: object) -> bool:
        """Compare all fields but ids."""
        return type(self) is type(other) and self._compared() == other._compared()

    __hash__ = None  # type: ignore[assignment]

    def _compared(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "id"}

    def __repr__(self) -> str:
        """Show the fields."""
        return f"{type(self).__name__}({vars(self)})"

    @classmethod
    def model_validate(cls, fields: dict[str, Any]) -> Self:
        """Make a record of a dict, as pydantic does."""
        return cls(**fields)

    def model_copy(self, *, update: dict[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values, as pydantic does."""
        other = copy.deepcopy(self) if deep else copy.copy(self)
        vars(other).update(update or {})
        return other

    def __deepcopy__(self, memory: dict[int, Any]) -> Self:
        """Copy the fields, too."""
        return type(self)(**copy.deepcopy(vars(self), memory))

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the fields as a dict, as pydantic does."""
        return {
            name: value.model_dump() if isinstance(value, Record) else value
            for name, value in vars(self).items()
        }

    def model_dump_json(self, **_: Any) -> str:
        """Return the fields as JSON, as pydantic does."""
        return json.dumps(self.model_dump())


class FunctionCall(Record):
    """Name and arguments of a call."""


class DeltaFunctionCall(Record):
    """Name and arguments in a delta."""

    defaults = {"name": None, "arguments": None}  # noqa: RUF012


class ToolCall(Record):
    """A whole call."""

    nested = {"function": FunctionCall}  # noqa: RUF012
    defaults = {"type": "function"}  # noqa: RUF012

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"id": f"call_{next(_NUMBERS)}", **fields})


class DeltaToolCall(Record):
    """A delta of a call."""

    nested = {"function": DeltaFunctionCall}  # noqa: RUF012
    defaults = {"id": None, "type": None, "index": 0, "function": None}  # noqa: RUF012


class DeltaMessage(Record):
    """A delta of an answer."""

    nested = {"tool_calls": DeltaToolCall}  # noqa: RUF012
    defaults = {"role": None, "content": None, "reasoning": None, "tool_calls": []}  # noqa: RUF012


class ExtractedToolCallInformation(Record):
    """A whole answer."""


class FunctionDefinition(Record):
    """Name and parameters of a tool."""

    defaults = {"description": None, "parameters": None, "strict": None}  # noqa: RUF012


class ChatCompletionToolsParam(Record):
    """A tool."""

    nested = {"function": FunctionDefinition}  # noqa: RUF012
    defaults = {"type": "function"}  # noqa: RUF012


class ChatCompletionRequest(Record):
    """A request: its tools are what a parser reads."""

    nested = {"tools": ChatCompletionToolsParam}  # noqa: RUF012
    tools: Any = None
    tool_choice: Any = "auto"
    skip_special_tokens: Any = True
    include_reasoning: Any = True
    messages: Any = ()
    model: Any = None
    structured_outputs: Any = None
    response_format: Any = None
    chat_template_kwargs: Any = None
    parallel_tool_calls: Any = True


class ToolCallItem(Record):
    """SGLang's delta of a call."""

    defaults = {"name": None, "parameters": ""}  # noqa: RUF012


class StreamingParseResult(Record):
    """SGLang's delta of an answer."""

    nested = {"calls": ToolCallItem}  # noqa: RUF012
    defaults = {"normal_text": "", "calls": []}  # noqa: RUF012
