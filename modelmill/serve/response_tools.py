"""Tools of a responses request, and how their calls are named.

The model is offered functions alone. A tool of type custom is a function with one string
(``custom_tools``), and those of a namespace have its name in front of their own. Tools that the
server of another maker runs (web_search, …) are left out, which the response's warnings say: coding
agents send them to every server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from modelmill.core.errors import RequestError
from modelmill.serve.compatibility_fields import ignored_field
from modelmill.serve.strict_models import FAIL_FAST, StrictModel
from modelmill.serve.tool_schema import (
    MAX_TOOLS,
    CustomTool,
    CustomToolChoice,
    CustomToolDefinition,
    CustomToolFormat,
    CustomToolGrammar,
    FunctionDefinition,
    NamedFunction,
    NamedToolChoice,
    Tool,
    ToolDefinitionBase,
    check_parameter_schemas_are_json,
    make_function_choice,
    make_function_tool,
)

MAX_TOOL_NAME_CHARS = 128
"""Characters of the name that the model is offered."""
ToolChoiceMode = Literal["none", "auto", "required"]


class FunctionTool(FunctionDefinition):
    """A function that may be called."""

    type: Literal["function"]
    defer_loading: bool | None = ignored_field("the model reads every tool")
    allowed_callers: Annotated[list[str], FAIL_FAST] | None = ignored_field(
        "there is one caller", max_length=16
    )
    output_schema: dict[str, Any] | None = ignored_field("chat templates have no place for it")

    def to_chat_tool(self, name: str) -> Tool:
        """The tool of a chat request, under another name."""
        return make_function_tool(
            FunctionDefinition(
                name=name,
                description=self.description,
                parameters=self.parameters,
                strict=self.strict,
            )
        )

    def to_json(self) -> dict[str, Any]:
        """The tool in the response."""
        return self.model_dump(include={"type", "name", "description", "parameters", "strict"})


class FlatCustomToolFormat(StrictModel):
    """The input of a custom tool: any text, or what a grammar describes."""

    type: Literal["text", "grammar"]
    definition: str | None = Field(None, max_length=65536)
    syntax: Literal["lark", "regex"] | None = None


class FlatCustomTool(ToolDefinitionBase):
    """A tool that takes a text."""

    type: Literal["custom"]
    format: FlatCustomToolFormat | None = None
    defer_loading: bool | None = ignored_field("the model reads every tool")
    allowed_callers: Annotated[list[str], FAIL_FAST] | None = ignored_field(
        "there is one caller", max_length=16
    )

    def to_chat_tool(self, name: str) -> CustomTool:
        """The tool of a chat request, under another name."""
        custom = CustomToolDefinition(
            name=name, description=self.description, format=self._chat_format()
        )
        return CustomTool(type="custom", custom=custom)

    def _chat_format(self) -> CustomToolFormat | None:
        if self.format is None:
            return None
        parts = (self.format.definition, self.format.syntax)
        if self.format.type == "text":
            if parts != (None, None):
                raise RequestError(
                    f"tools: the format of {self.name} is text, which takes no definition and no "
                    "syntax"
                )
            return None
        if self.format.definition is None or self.format.syntax is None:
            raise RequestError(
                f"tools: the format of {self.name} needs a definition and its syntax"
            )
        grammar = CustomToolGrammar(definition=self.format.definition, syntax=self.format.syntax)
        return CustomToolFormat(type="grammar", grammar=grammar)

    def to_json(self) -> dict[str, Any]:
        """The tool in the response."""
        return self.model_dump(include={"type", "name", "description", "format"}, exclude_none=True)


NamespacedTool = Annotated[FunctionTool | FlatCustomTool, Field(discriminator="type")]


class NamespaceTool(ToolDefinitionBase):
    """Tools of one name space, such as those of an MCP server behind the client."""

    type: Literal["namespace"]
    tools: Annotated[list[NamespacedTool], FAIL_FAST] = Field(min_length=1, max_length=MAX_TOOLS)

    def to_json(self) -> dict[str, Any]:
        """The tool in the response."""
        tools = [tool.to_json() for tool in self.tools]
        return {**self.model_dump(include={"type", "name", "description"}), "tools": tools}


class HostedTool(StrictModel):
    """A tool that another maker's server runs; its options are ignored, as the tool is."""

    model_config = ConfigDict(extra="ignore")

    type: Literal[
        "web_search", "web_search_2025_08_26", "web_search_preview",
        "web_search_preview_2025_03_11", "file_search", "code_interpreter", "image_generation",
        "computer", "computer_use_preview", "local_shell", "shell", "apply_patch", "mcp",
        "tool_search", "programmatic_tool_calling",
    ]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The tool in the response."""
        return {"type": self.type}


ResponseTool = Annotated[
    FunctionTool | FlatCustomTool | NamespaceTool | HostedTool, Field(discriminator="type")
]
ResponseTools = Annotated[list[ResponseTool], FAIL_FAST]


class FlatToolChoice(StrictModel):
    """Tool choice that forces one tool."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    @property
    def offered_name(self) -> str:
        """The name that the model is offered."""
        return offered_name(self.name, self.namespace)

    def to_chat_choice(self) -> NamedToolChoice | CustomToolChoice:
        """The choice of a chat request."""
        if self.type == "function":
            return make_function_choice(self.offered_name)
        return CustomToolChoice(type="custom", custom=NamedFunction(name=self.offered_name))


class AllowedToolsChoice(StrictModel):
    """Some of the tools, and whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: ToolChoiceMode = "auto"
    tools: Annotated[list[FlatToolChoice | HostedTool], FAIL_FAST] = Field(
        min_length=1, max_length=MAX_TOOLS
    )

    @property
    def offered_names(self) -> set[str]:
        """Names that the model is offered."""
        return {each.offered_name for each in self.tools if isinstance(each, FlatToolChoice)}


@dataclass(frozen=True)
class ClientToolName:
    """What the client calls a tool.

    Attributes:
        name: its own name.
        namespace: the name space that it is in, if any.
        is_custom: whether its input is a text.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False

    def name_fields(self) -> dict[str, Any]:
        """Name and name space as items have them."""
        return {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})


def offered_name(name: str, namespace: str | None) -> str:
    """The name that the model is offered for a tool."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def client_names_by_offered_name(tools: Sequence[ResponseTool]) -> dict[str, ClientToolName]:
    """The tools that may be called, by the names that the model is offered."""
    return {
        offered_name(tool.name, space): ClientToolName(tool.name, space, tool.type == "custom")
        for tool, space in _iter_namespaced_tools(tools)
    }


def to_chat_tools(tools: Sequence[ResponseTool]) -> list[Tool | CustomTool]:
    """The tools of the equivalent chat request.

    Raises:
        RequestError: there are too many, a name is too long with its name space, a schema is not
            JSON, or a grammar is incomplete.
    """
    count = sum(1 for _ in _iter_namespaced_tools(tools))
    if count > MAX_TOOLS:
        raise RequestError(
            f"tools: {count} with those of namespaces, at most {MAX_TOOLS} are allowed"
        )
    check_parameter_schemas_are_json(
        tool for tool, _ in _iter_namespaced_tools(tools) if isinstance(tool, FunctionTool)
    )
    converted = []
    for tool, space in _iter_namespaced_tools(tools):
        name = offered_name(tool.name, space)
        if len(name) > MAX_TOOL_NAME_CHARS:
            raise RequestError(
                f"tools: {name[:60]}… has {len(name)} characters with its namespace, at most "
                f"{MAX_TOOL_NAME_CHARS} are allowed"
            )
        converted.append(tool.to_chat_tool(name))
    return converted


def tool_warnings(tools: Sequence[ResponseTool]) -> list[str]:
    """A line for every tool that is left out."""
    return [
        f"tools[{index}]: {tool.type} is left out: this server runs no tools"
        for index, tool in enumerate(tools)
        if isinstance(tool, HostedTool)
    ]


def _iter_namespaced_tools(
    tools: Sequence[ResponseTool],
) -> Iterator[tuple[FunctionTool | FlatCustomTool, str | None]]:
    """The tools with their name spaces."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from ((each, tool.name) for each in tool.tools)
        elif not isinstance(tool, HostedTool):
            yield tool, None
