"""Requests of /v1/responses and their conversion to chat requests.

A request with ``previous_response_id`` gets the items of that response before its own input
(``response_store``); the rest is the same as if the client had sent them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from modelmill.core.errors import RequestError
from modelmill.core.types import MAX_INT32
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.compaction import SUMMARY_INTRO, join_successive_user_messages
from modelmill.serve.compatibility_fields import (
    EchoOffField,
    VllmGenerationFields,
    ignored_field,
)
from modelmill.serve.custom_tools import custom_function_call
from modelmill.serve.discriminated_unions import make_converted_request, parse_by_type_field
from modelmill.serve.encrypted_content_codec import PACKED_TEXT_PREFIX, TextDecompressor
from modelmill.serve.engine_request_fields import EngineRequestFields
from modelmill.serve.generation_schema import MAX_TOP_LOGPROBS
from modelmill.serve.response_tools import (
    AllowedToolsChoice,
    ClientToolName,
    FlatToolChoice,
    ResponseTools,
    ToolChoiceMode,
    client_names_by_offered_name,
    offered_name,
    to_chat_tools,
    tool_warnings,
)
from modelmill.serve.sampling_schema import SamplingFields
from modelmill.serve.strict_models import (
    FAIL_FAST,
    MAX_ITEMS,
    IgnoredList,
    JsonObject,
    JsonObjectList,
    Metadata,
    ModelName,
    StrictModel,
    UnknownNullTolerantModel,
)
from modelmill.serve.structured_outputs_schema import ResponseFormat
from modelmill.serve.tool_schema import (
    MAX_TOOLS,
    CustomTool,
    CustomToolChoice,
    NamedToolChoice,
    Tool,
)
from modelmill.text.answer_pieces import make_openai_tool_call

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED_REASONING = "reasoning.encrypted_content"
"""What ``include`` may have."""
INCLUDE_HOSTED_RESULTS = frozenset(
    (
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    )
)
"""Results of tools that are left out: with a warning, as the tools are."""
LongText = Annotated[str, Field(max_length=10 << 20)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
TOOL_NAME_PATTERN = r"^[a-zA-Z0-9_-]{1,128}$"


class ContentPart(StrictModel):
    """A part of a message's content."""

    type: Literal["input_text", "output_text", "text", "refusal", "input_image"]
    text: LongText | None = None
    refusal: LongText | None = None
    image_url: str | None = None
    detail: Literal["low", "high", "auto"] | None = None
    annotations: IgnoredList | None = None
    logprobs: IgnoredList | None = None

    def to_chat_part(self) -> dict[str, Any]:
        """Convert to a part of a chat message.

        Raises:
            RequestError: a field is missing.
        """
        if self.type == "input_image":
            if self.image_url is None:
                raise RequestError(
                    "an input_image needs its image_url (a data: URL); files are not stored here"
                )
            detail = {"detail": self.detail} if self.detail else {}
            return {"type": "image_url", "image_url": {"url": self.image_url, **detail}}
        text = self.refusal if self.type == "refusal" else self.text
        if text is None:
            raise RequestError(f"a part of type {self.type} needs its text")
        return {"type": "text", "text": text}


ContentParts = Annotated[list[ContentPart], FAIL_FAST, Field(max_length=MAX_ITEMS)]


class MessageItem(StrictModel):
    """A message in the input of a responses request."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: LongText | ContentParts
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(StrictModel):
    """What calls of functions and of custom tools have in common."""

    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(pattern=TOOL_NAME_PATTERN)
    namespace: str | None = Field(None, max_length=128)
    id: str | None = None
    status: ItemStatus | None = None

    @property
    def offered_name(self) -> str:
        """The name under which the model is offered the tool."""
        return offered_name(self.name, self.namespace)


class FunctionCallItem(CallItem):
    """A call made by the model."""

    type: Literal["function_call"]
    arguments: LongText

    def to_chat_call(self) -> dict[str, Any]:
        """The call in a chat message."""
        return make_openai_tool_call(self.call_id, self.offered_name, self.arguments)


class CustomCallItem(CallItem):
    """A call of a custom tool made by the model."""

    type: Literal["custom_tool_call"]
    input: LongText

    def to_chat_call(self) -> dict[str, Any]:
        """The call in a chat message."""
        return custom_function_call(self.call_id, self.offered_name, self.input)


class FunctionCallOutputItem(StrictModel):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    output: LongText | ContentParts
    name: str | None = ignored_field("the call has it")
    id: str | None = None
    status: ItemStatus | None = None


class CompactionItem(StrictModel):
    """A summary of the conversation so far, made by /v1/responses/compact."""

    type: Literal["compaction", "compaction_summary"]
    encrypted_content: LongText
    id: str | None = None
    created_by: str | None = None


class ReasoningPart(StrictModel):
    """A part of a reasoning item."""

    type: str
    text: LongText | None = None


class ReasoningItem(StrictModel):
    """The thinking before an answer; its summary, and what another server encrypted, are ignored.

    Some clients return the content, others what ``include`` asked for (``encrypted_content``).
    """

    type: Literal["reasoning"]
    summary: IgnoredList
    id: str | None = None
    content: Annotated[list[ReasoningPart], FAIL_FAST, Field(max_length=MAX_ITEMS)] | None = None
    encrypted_content: LongText | None = None
    status: ItemStatus | None = None

    def text(self, unpacker: TextDecompressor) -> str:
        """The thinking.

        Raises:
            RequestError: its packed form is damaged, or too large.
        """
        text = "".join(part.text or "" for part in self.content or ())
        packed = self.encrypted_content or ""
        return (
            unpacker.decompress(packed)
            if not text and packed.startswith(PACKED_TEXT_PREFIX)
            else text
        )


class ItemReference(StrictModel):
    """An item of an earlier response, in whose place its id stands; the type may be missing."""

    type: Literal["item_reference"] | None = None
    id: str


InputItem = (
    MessageItem
    | FunctionCallItem
    | CustomCallItem
    | FunctionCallOutputItem
    | ReasoningItem
    | CompactionItem
)
_ITEM_CLASSES_BY_TYPE: dict[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
    "compaction": CompactionItem,
    "compaction_summary": CompactionItem,
}


class TextFormat(StrictModel):
    """Constraint on the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, min_length=1, max_length=256)
    schema_: JsonObject | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    def to_response_format(self) -> ResponseFormat:
        """Convert to a response_format.

        Raises:
            RequestError: the fields contradict each other.
        """
        if self.type != "json_schema":
            if self.name is not None or self.schema_ is not None:
                raise RequestError(
                    f"text.format: name and schema belong to json_schema, not to {self.type}"
                )
            return ResponseFormat.model_validate({"type": self.type})
        if self.schema_ is None:
            raise RequestError("text.format: json_schema needs a schema")
        schema = {
            "name": self.name,
            "schema": self.schema_,
            "strict": self.strict,
            "description": self.description,
        }
        return ResponseFormat.model_validate({"type": self.type, "json_schema": schema})


class TextConfig(StrictModel):
    """verbosity: accepted and ignored."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(StrictModel):
    """Reasoning options of the OpenAI API.

    effort is a variable of chat templates that read it; the others are accepted and ignored: there
    is one mode, and which earlier thinking the model reads is up to its chat template.
    """

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponseStreamOptions(StrictModel):
    """Stream options of the OpenAI API; accepted and ignored."""

    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingFields, VllmGenerationFields, EchoOffField):
    """Request body of POST /v1/responses."""

    # input[i].content[j].logprobs, copied from a response: of 16,000 tokens with five each, or
    # 7,000 with twenty
    unused: ClassVar[Mapping[str, int]] = {"logprobs": 5}

    input: LongText | JsonObjectList = Field(
        description="a string, or items: messages, calls and their outputs"
    )
    instructions: LongText | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    text: TextConfig | None = None
    tools: ResponseTools | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceMode | FlatToolChoice | AllowedToolsChoice | None = Field(
        None,
        description='"none", "auto", "required", {"type": "function", "name": …}, {"type": '
        '"custom", "name": …} or {"type": "allowed_tools", …}',
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    include: Annotated[list[str], FAIL_FAST] | None = Field(None, max_length=16)
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="false: no later request can continue it")
    conversation: str | JsonObject | None = None
    prompt: JsonObject | None = None
    # accepted and ignored
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(None, ge=1, le=MAX_INT32)
    reasoning: ReasoningConfig | None = None
    stream_options: ResponseStreamOptions | None = None
    prompt_cache_retention: str | None = None
    client_metadata: JsonObject | None = ignored_field("nothing is stored")
    context_management: JsonObjectList | None = ignored_field(
        "the model reads the whole conversation"
    )
    # extensions
    chat_template_kwargs: JsonObject | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=MAX_INT32)
    include_reasoning: bool | None = Field(
        None, description="false: the output has no reasoning items"
    )

    def check(self) -> None:
        """Raise RequestError for fields that are not supported."""
        if not self.input:
            raise RequestError("input is empty; give a string or at least one item")
        if self.conversation is not None:
            raise RequestError(
                "conversation is not supported: conversations are not stored; send "
                "previous_response_id, or the earlier items in input"
            )
        if self.prompt is not None:
            raise RequestError(
                "prompt is not supported: templates are not stored; send instructions and input"
            )
        if self.background:
            raise RequestError("background is not supported; use stream")
        if self.truncation == "auto":
            raise RequestError(
                "truncation auto is not supported: an input that is too long is rejected"
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for stream: true")
        unknown = [
            each
            for each in self.include or ()
            if each not in (INCLUDE_LOGPROBS, INCLUDE_ENCRYPTED_REASONING, *INCLUDE_HOSTED_RESULTS)
        ]
        if unknown:
            raise RequestError(
                f"include has {unknown[0][:60]!r}, which is not supported; there are "
                f"{INCLUDE_LOGPROBS} and {INCLUDE_ENCRYPTED_REASONING}"
            )

    def image_field_paths(self, num_earlier: int) -> Iterator[str]:
        """The fields of the pictures, in order; see ``iter_image_field_paths``."""
        return iter_image_field_paths(
            [] if isinstance(self.input, str) else self.input, num_earlier
        )

    @property
    def wants_encrypted_reasoning(self) -> bool:
        """Whether reasoning items have their text as ``encrypted_content``, too."""
        return INCLUDE_ENCRYPTED_REASONING in (self.include or ())

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are requested."""
        return bool(self.top_logprobs) or INCLUDE_LOGPROBS in (self.include or ())

    def to_chat_request(self) -> ChatRequest:
        """Convert to the equivalent chat request.

        Raises:
            RequestError: a field is not supported or invalid.
        """
        self.check()
        shared = {name: getattr(self, name) for name in SamplingFields.model_fields}
        tools, choice = self._chat_tools_and_choice()
        format = (
            None
            if self.text is None or self.text.format is None
            else self.text.format.to_response_format()
        )
        return make_converted_request(
            ChatRequest,
            {
                **shared,
                "messages": items_to_messages(self.input, self.instructions),
                "max_completion_tokens": self.max_output_tokens,
                "response_format": format,
                "tools": tools,
                "tool_choice": choice,
                "logprobs": True if self.wants_logprobs else None,
                "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
                "parallel_tool_calls": self.parallel_tool_calls,
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
                "chat_template_kwargs": self.chat_template_kwargs,
                "thinking_token_budget": self.thinking_token_budget,
            },
        )

    @property
    def client_names_by_offered_name(self) -> dict[str, ClientToolName]:
        """The tools by the names that the model is offered."""
        return client_names_by_offered_name(self.tools or ())

    @property
    def tool_warnings(self) -> list[str]:
        """A line for every tool that is left out, and for results of such tools."""
        results = [each for each in self.include or () if each in INCLUDE_HOSTED_RESULTS]
        return [
            *tool_warnings(self.tools or ()),
            *(f"include: there is no {each}: this server runs no tools" for each in results),
        ]

    def _chat_tools_and_choice(
        self,
    ) -> tuple[
        list[Tool | CustomTool] | None,
        ToolChoiceMode | NamedToolChoice | CustomToolChoice | None,
    ]:
        tools, choice = to_chat_tools(self.tools or ()), self.tool_choice
        if not tools and choice not in (None, "none", "auto"):
            left_out = tool_warnings(self.tools or ())
            if left_out:
                raise RequestError(f"tool_choice needs a tool that may be called; {left_out[0]}")
        if isinstance(choice, AllowedToolsChoice):
            names = choice.offered_names
            if names - {tool.name for tool in tools}:
                raise RequestError("tool_choice names a function that is not among the tools")
            return [tool for tool in tools if tool.name in names] or None, choice.mode
        if isinstance(choice, FlatToolChoice):
            return tools or None, choice.to_chat_choice()
        return tools or None, choice


class CompactRequest(EngineRequestFields, UnknownNullTolerantModel):
    """Request body of POST /v1/responses/compact."""

    may_omit_model: ClassVar[bool] = True

    model: ModelName = ""
    input: LongText | JsonObjectList | None = None
    instructions: LongText | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonObject | None = ignored_field(
        "cached prefixes stay until memory is needed"
    )
    service_tier: str | None = ignored_field("there is one tier")
    # of the requests that the conversation is made of
    tools: IgnoredList | None = ignored_field("a summary calls no tool")
    parallel_tool_calls: bool | None = ignored_field("as tools")
    text: JsonObject | None = ignored_field("a summary has no format")
    reasoning: JsonObject | None = ignored_field("a summary is written without thinking")


def items_to_messages(
    items: str | list[dict[str, Any]], instructions: str | None
) -> list[dict[str, Any]]:
    """Convert items to chat messages; calls join the message before them.

    Raises:
        RequestError: an item is invalid; the message names it.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    unpacker = TextDecompressor()
    is_compacted = False
    for index, raw in enumerate(items):
        item = parse_by_type_field(
            raw,
            f"input[{index}]",
            _ITEM_CLASSES_BY_TYPE,
            "items",
            default="message",
            resolved_types=("item_reference",),
        )
        try:
            _append_item_as_message(messages, item, unpacker)
            is_compacted = is_compacted or isinstance(item, CompactionItem)
        except RequestError as error:
            raise RequestError(f"input[{index}]: {error}") from None
    if is_compacted:
        messages = join_successive_user_messages(messages)
    if all(message["role"] == "system" for message in messages):
        raise RequestError("input has no user or assistant message; give at least one")
    if len(messages) > MAX_ITEMS:
        raise RequestError(
            f"input: {len(messages)} messages with instructions and earlier items; at most "
            f"{MAX_ITEMS} are allowed"
        )
    return messages


def iter_image_field_paths(items: Sequence[Any], num_earlier: int) -> Iterator[str]:
    """Yield the fields of the pictures of valid items, in order.

    Args:
        items: of the conversation.
        num_earlier: how many of them ``previous_response_id`` stands for.
    """
    for index, item in enumerate(items):
        key = "output" if "output" in item else "content"
        parts = item.get(key)
        if not isinstance(parts, list) or item.get("type") == "reasoning":
            continue
        for number, part in enumerate(parts):
            if part["type"] != "input_image":
                continue
            if index < num_earlier:
                yield "previous_response_id: a picture of an earlier item"
            else:
                yield f"input[{index - num_earlier}].{key}[{number}]"


def _append_item_as_message(
    messages: list[dict[str, Any]], item: InputItem, unpacker: TextDecompressor
) -> None:
    if isinstance(item, MessageItem):
        message = {"role": item.role, "content": _to_chat_content(item.content)}
        if item.role == "assistant" and messages and _is_only_thinking(messages[-1]):
            messages[-1].update(message)
        else:
            messages.append(message)
    elif isinstance(item, ReasoningItem):
        text = item.text(unpacker)
        if text:
            thinking = {"role": "assistant", "content": "", "reasoning_content": text}
            messages.append(thinking)
    elif isinstance(item, FunctionCallItem | CustomCallItem):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        if _is_only_thinking(messages[-1]):
            messages[-1]["content"] = None
        messages[-1].setdefault("tool_calls", []).append(item.to_chat_call())
    elif isinstance(item, CompactionItem):
        summary = unpacker.decompress(item.encrypted_content)
        messages.append({"role": "user", "content": f"{SUMMARY_INTRO}{summary}"})
    elif isinstance(item, FunctionCallOutputItem):
        messages.append(
            {"role": "tool", "tool_call_id": item.call_id, "content": _to_chat_content(item.output)}
        )


def _is_only_thinking(message: Mapping[str, Any]) -> bool:
    """Whether a message has the thinking of an answer, which follows."""
    return message.keys() == {"role", "content", "reasoning_content"} and not message["content"]


def _to_chat_content(content: str | list[ContentPart]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [part.to_chat_part() for part in content]
