"""Tools that a request offers, and its choice of one."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from modelmill.core.errors import RequestError
from modelmill.serve.custom_tools import check_regex_syntax, enforceable_pattern, input_schema
from modelmill.serve.strict_models import FAIL_FAST, JsonObject, StrictModel
from modelmill.text.message_validation import check_json_data

MAX_TOOLS = 512
"""Tools of a request: OpenAI takes 128, Anthropic more; an agent with MCP servers has hundreds."""


class ToolDefinitionBase(StrictModel):
    """What every tool has."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")
    description: str | None = Field(None, max_length=65536)


class FunctionDefinition(ToolDefinitionBase):
    """A function. A forced call always matches the parameters, another one if strict is true."""

    parameters: JsonObject | None = None
    strict: bool | None = None


class TypeKeyedToolModel(StrictModel):
    """A tool or the choice of one: what has its name is the field of the name of its type."""

    type: str

    @property
    def name(self) -> str:
        """Name of the tool."""
        return str(getattr(self, self.type).name)


class Tool(TypeKeyedToolModel):
    """A function that may be called."""

    type: Literal["function"]
    function: FunctionDefinition

    def as_template_tool(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        return self.model_dump(exclude_none=True)


class CustomToolGrammar(StrictModel):
    """The grammar of a custom tool's input: the model reads it, and a regex is enforced."""

    definition: str = Field(max_length=65536)
    syntax: Literal["lark", "regex"]


class CustomToolFormat(StrictModel):
    """The input of a custom tool: any text, or what a grammar describes."""

    type: Literal["text", "grammar"]
    grammar: CustomToolGrammar | None = None

    def check(self) -> None:
        """Raise RequestError unless exactly the type grammar has a grammar; a regex must be one."""
        if (self.grammar is not None) != (self.type == "grammar"):
            needs = "needs" if self.grammar is None else "takes no"
            raise RequestError(f"tools: a format of type {self.type} {needs} grammar")
        if self.grammar is not None and self.grammar.syntax == "regex":
            check_regex_syntax(self.grammar.definition)


class CustomToolDefinition(ToolDefinitionBase):
    """A tool that takes a text."""

    format: CustomToolFormat | None = None


class CustomTool(TypeKeyedToolModel):
    """A tool that takes a text (``custom_tools``)."""

    type: Literal["custom"]
    custom: CustomToolDefinition

    def as_template_tool(self) -> dict[str, Any]:
        """The tool as chat templates read it: a function with one string."""
        function = {"name": self.name, "description": self._description_with_grammar()}
        known = {key: value for key, value in function.items() if value is not None}
        pattern = self._pattern
        strict = {} if pattern is None else {"strict": True}
        parameters = input_schema(pattern)
        return {"type": "function", "function": {**known, "parameters": parameters, **strict}}

    @property
    def has_unenforced_grammar(self) -> bool:
        """Whether the input may differ from its grammar: one in Lark's notation is not enforced."""
        return self.grammar is not None and self._pattern is None

    @functools.cached_property
    def _pattern(self) -> str | None:
        """What the input matches: its regular expression, if it can be enforced."""
        grammar = self.grammar
        if grammar is None or grammar.syntax != "regex":
            return None
        return enforceable_pattern(grammar.definition)

    @property
    def grammar(self) -> CustomToolGrammar | None:
        """The grammar of its input."""
        return None if self.custom.format is None else self.custom.format.grammar

    def _description_with_grammar(self) -> str | None:
        """What the model reads: a grammar is part of it."""
        grammar = self.grammar
        if grammar is None:
            return self.custom.description
        rule = f"The input matches this grammar ({grammar.syntax}):\n{grammar.definition}"
        return "\n\n".join(filter(None, (self.custom.description, rule)))


def _reject_hosted_tool_types(tools: Any) -> Any:
    """Name a tool that another server would run; pydantic would name the types' fields."""
    if isinstance(tools, list):
        types = [tool.get("type", "") if isinstance(tool, dict) else "" for tool in tools]
        known = ("function", "custom", "")
        index = next((i for i, each in enumerate(types) if each not in known), None)
        if index is not None and isinstance(types[index], str):
            raise ValueError(
                f"number {index} has the type {types[index][:40]!r}, which this server does not "
                "have; there are function and custom"
            )
    return tools


ChatTools = Annotated[
    list[Tool | CustomTool],
    FAIL_FAST,
    Field(max_length=MAX_TOOLS),
    BeforeValidator(_reject_hosted_tool_types),
]
"""The tools of a chat request."""


def check_parameter_schemas_are_json(functions: Iterable[FunctionDefinition]) -> None:
    """Check the parameter schemas.

    Raises:
        RequestError: a schema is not JSON, or is nested too deeply.
    """
    for function in functions:
        check_json_data(function.parameters, f"tools: the schema of {function.name}")


class NamedFunction(StrictModel):
    """The function of a tool_choice."""

    name: str


class NamedToolChoice(TypeKeyedToolModel):
    """tool_choice: call this function."""

    type: Literal["function"]
    function: NamedFunction


class CustomToolChoice(TypeKeyedToolModel):
    """tool_choice: call this custom tool."""

    type: Literal["custom"]
    custom: NamedFunction


def make_function_tool(function: FunctionDefinition) -> Tool:
    """The tool that calls a function."""
    return Tool(type="function", function=function)


def make_function_choice(name: str) -> NamedToolChoice:
    """The choice of the function of this name."""
    return NamedToolChoice(type="function", function=NamedFunction(name=name))


class AllowedTools(StrictModel):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice | CustomToolChoice], FAIL_FAST] = Field(
        min_length=1, max_length=MAX_TOOLS
    )


class AllowedToolChoice(StrictModel):
    """tool_choice: some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
