"""Tools that a request offers, and its choice of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from modelmill.serve.custom_tools import INPUT_SCHEMA
from modelmill.serve.strict_models import FAIL_FAST, JsonObject, StrictModel
from modelmill.text.messages import check_json_data


class ToolDefinition(StrictModel):
    """What every tool has."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")
    description: str | None = Field(None, max_length=65536)


class FunctionDefinition(ToolDefinition):
    """A function. A forced call always matches the parameters, another one if strict is true."""

    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedByType(StrictModel):
    """A tool or the choice of one: what has its name is the field of the name of its type."""

    type: str

    @property
    def name(self) -> str:
        """Name of the tool."""
        return str(getattr(self, self.type).name)


class Tool(NamedByType):
    """A function that may be called."""

    type: Literal["function"]
    function: FunctionDefinition

    def to_function(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        return self.model_dump(exclude_none=True)


class CustomFormat(StrictModel):
    """The input of a custom tool; grammars are not supported."""

    type: Literal["text"]


class CustomDefinition(ToolDefinition):
    """A tool that takes a text."""

    format: CustomFormat | None = None


class CustomTool(NamedByType):
    """A tool that takes a text (``custom_tools``)."""

    type: Literal["custom"]
    custom: CustomDefinition

    def to_function(self) -> dict[str, Any]:
        """The tool as chat templates read it: a function with one string."""
        function = {"name": self.name, "description": self.custom.description}
        known = {key: value for key, value in function.items() if value is not None}
        return {"type": "function", "function": {**known, "parameters": INPUT_SCHEMA}}


def check_functions(functions: Iterable[FunctionDefinition]) -> None:
    """Check the parameter schemas.

    Raises:
        RequestError: a schema is not JSON, or is nested too deeply.
    """
    for function in functions:
        check_json_data(function.parameters, f"tools: the schema of {function.name}")


class NamedFunction(StrictModel):
    """The function of a tool_choice."""

    name: str


class NamedToolChoice(NamedByType):
    """tool_choice: call this function."""

    type: Literal["function"]
    function: NamedFunction


class CustomToolChoice(NamedByType):
    """tool_choice: call this custom tool."""

    type: Literal["custom"]
    custom: NamedFunction


def function_tool(function: FunctionDefinition) -> Tool:
    """The tool that calls a function."""
    return Tool(type="function", function=function)


def function_choice(name: str) -> NamedToolChoice:
    """The choice of the function of this name."""
    return NamedToolChoice(type="function", function=NamedFunction(name=name))


class AllowedTools(StrictModel):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice | CustomToolChoice], FAIL_FAST] = Field(
        min_length=1, max_length=128
    )


class AllowedToolChoice(StrictModel):
    """tool_choice: some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
