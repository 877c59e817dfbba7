"""Requests of /v1/messages and /v1/messages/count_tokens, and their conversion to chat requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from modelmill.core.errors import RequestError
from modelmill.core.types import MAX_INT32
from modelmill.serve.catalogue.keep_alive import KeepAliveField
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.compatibility_fields import AnyItems, VllmFields, ignored_field
from modelmill.serve.dialects.anthropic_blocks import (
    BlockText,
    LongText,
    iter_image_field_paths,
    to_chat_messages,
)
from modelmill.serve.discriminated_unions import make_converted_request
from modelmill.serve.engine_request_fields import EngineRequestFields
from modelmill.serve.sampling_schema import sampling_field
from modelmill.serve.strict_models import (
    FAIL_FAST,
    IgnoredList,
    JsonObject,
    JsonObjectList,
    ModelName,
    StrictModel,
    UnknownNullTolerantModel,
)
from modelmill.serve.structured_outputs_schema import JsonSchema, ResponseFormat
from modelmill.serve.tool_schema import (
    MAX_TOOLS,
    CustomTool,
    FunctionDefinition,
    Tool,
    make_function_choice,
    make_function_tool,
)


class AnthropicTool(UnknownNullTolerantModel):
    """A tool of the client; the maker's own tools (bash, web_search, …) are not run here."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")
    input_schema: JsonObject
    description: str | None = Field(None, max_length=65536)
    cache_control: JsonObject | None = ignored_field("every prefix is cached without marks")
    strict: bool | None = Field(None, description="true: every call fits its schema")
    eager_input_streaming: bool | None = ignored_field("inputs are streamed as they are written")
    defer_loading: bool | None = ignored_field("the model reads every tool")
    input_examples: IgnoredList | None = ignored_field("chat templates have no place for them")
    allowed_callers: IgnoredList | None = ignored_field("there is one caller")

    @field_validator("type", mode="before")
    @classmethod
    def _reject_anthropic_tools(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "custom":
            raise ValueError(
                f"{value[:60]!r} is a tool of Anthropic's API, which this server does not have; "
                "give tools with name and input_schema"
            )
        return value


class AnthropicToolChoice(StrictModel):
    """Whether and which tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(StrictModel):
    """Whether the model thinks before it answers, and whether the client reads what it thinks.

    between_tools: it does not think, and notes between its calls may come back as thinking; here
    they are text.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: blocks of thinking have a signature, and no text"
    )


class OutputFormat(StrictModel):
    """The JSON schema of the answer."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")
    name: str | None = None


class OutputConfig(StrictModel):
    """The format of the answer, and how much the model thinks before it."""

    format: OutputFormat | None = None
    effort: str | None = Field(
        None, max_length=64, description="for chat templates that read reasoning_effort"
    )


class CountTokensRequest(VllmFields):
    """Request body of POST /v1/messages/count_tokens: what makes up the prompt."""

    may_omit_model: ClassVar[bool] = True

    model: ModelName = ""
    keep_alive: KeepAliveField = None
    messages: JsonObjectList = Field(min_length=1)
    system: LongText | BlockText | None = Field(
        None, description="a string, or a list of text blocks"
    )
    tools: Annotated[list[AnthropicTool], FAIL_FAST] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: JsonObject | None = ignored_field("every prefix is cached without marks")
    context_management: JsonObject | None = ignored_field("the model reads the whole conversation")
    billing_policy: JsonObject | None = ignored_field("there are no accounts")
    speed: str | None = ignored_field("there is one speed")
    # extension, as of chat
    chat_template_kwargs: JsonObject | None = None
    # refused unless empty
    mcp_servers: AnyItems | None = None

    def image_field_paths(self) -> Iterator[str]:
        """The fields of the pictures, in order."""
        return iter_image_field_paths(self.messages)

    def to_chat_request(self) -> ChatRequest:
        """Convert to the equivalent chat request.

        Raises:
            RequestError: a field is not supported or invalid.
        """
        return self._make_chat_request()

    def _make_chat_request(self, **fields: Any) -> ChatRequest:
        if self.mcp_servers:
            raise RequestError("mcp_servers is not supported: this server calls no other server")
        messages = to_chat_messages(self.system, self.messages)
        tools, choice = self._convert_tools()
        one_call = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
        return make_converted_request(
            ChatRequest,
            {
                "model": self.model,
                "messages": messages,
                "tools": tools,
                "tool_choice": choice,
                "parallel_tool_calls": False if one_call else None,
                "response_format": self._response_format(),
                "chat_template_kwargs": self.chat_template_kwargs,
                "continue_final_message": _ends_with_assistant_prefill(messages) or None,
                **fields,
            },
        )

    @property
    def thinks(self) -> bool | None:
        """Whether the model shall think; None: as its chat template does by itself."""
        return None if self.thinking is None else self.thinking.type in ("enabled", "adaptive")

    @property
    def omits_thinking(self) -> bool:
        """Whether the answer's blocks of thinking have no text."""
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def effort(self) -> str | None:
        """How much the model shall think; None: as its chat template has it by itself."""
        return None if self.output_config is None else self.output_config.effort

    def _response_format(self) -> ResponseFormat | None:
        config = self.output_config
        formats = [self.output_format, None if config is None else config.format]
        chosen = [each for each in formats if each is not None]
        if not chosen:
            return None
        if len(chosen) > 1:
            raise RequestError("output_format and output_config.format exclude each other")
        schema = JsonSchema.model_validate({"name": "output", "schema": chosen[0].schema_})
        return ResponseFormat.model_validate({"type": "json_schema", "json_schema": schema})

    def _convert_tools(self) -> tuple[list[Tool | CustomTool] | None, Any]:
        tools: list[Tool | CustomTool] = [
            make_function_tool(
                FunctionDefinition(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.input_schema,
                    strict=tool.strict,
                )
            )
            for tool in self.tools or ()
        ]
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return tools or None, None if choice is None else choice.type
        if not tools:
            raise RequestError("tool_choice needs tools")
        if choice.type == "any":
            return tools, "required"
        if choice.name is None:
            raise RequestError("tool_choice of type tool needs a name")
        return tools, make_function_choice(choice.name)


class MessagesRequest(CountTokensRequest, EngineRequestFields):
    """Request body of POST /v1/messages."""

    max_tokens: int = Field(
        ge=0, le=MAX_INT32, description="0: the prompt is read into the cache, and not answered"
    )
    temperature: float | None = sampling_field("temperature", most=1)
    top_p: float | None = sampling_field("top_p")
    top_k: int | None = sampling_field("top_k")
    min_tokens: int | None = sampling_field("min_tokens")  # extension, as of chat
    stop_sequences: Annotated[list[str], FAIL_FAST] | None = Field(None, max_length=64)
    stream: bool | None = None
    metadata: JsonObject | None = ignored_field("there are no accounts")
    service_tier: str | None = ignored_field("there is one tier")
    inference_geo: str | None = ignored_field("the model runs where the server is")
    container: str | None = ignored_field("there are no containers")
    diagnostics: JsonObject | None = ignored_field("usage says how much of the prompt was cached")
    fallbacks: JsonObjectList | str | None = ignored_field("no request is declined for its content")
    fallback_credit_token: str | None = ignored_field("there are no accounts")

    def to_chat_request(self) -> ChatRequest:
        """Convert to the equivalent chat request; raises as ``CountTokensRequest`` does."""
        if not all(self.stop_sequences or ()):
            raise RequestError("stop_sequences must have strings that are not empty")
        # chat takes 0 as llama.cpp names it
        limit = {"max_tokens" if self.max_tokens else "n_predict": self.max_tokens}
        return self._make_chat_request(
            **limit,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_tokens=self.min_tokens,
            stop=self.stop_sequences or None,
            stream=self.stream,
            cache_salt=self.cache_salt,
        )


def _ends_with_assistant_prefill(messages: list[dict[str, Any]]) -> bool:
    """Whether the last turn is the beginning of the answer, which continues it."""
    last = messages[-1]
    if last["role"] != "assistant":
        return False
    if last.get("tool_calls"):
        raise RequestError(
            "messages ends with a tool_use that has no tool_result; add a user message with it"
        )
    return True
