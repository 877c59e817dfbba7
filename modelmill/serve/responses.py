"""What /v1/responses is asked, and the conversation that it means: from there on it is a chat request like any other.

Nothing of a response is kept on the server: there is no ``previous_response_id``, and ``store`` is always false. A
client sends the items of the conversation again; the prefix cache makes that cheap, and no memory grows with answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from modelmill.core.errors import RequestError
from modelmill.serve.bounded import MAX_ITEMS, STOPS, Anything, Metadata, Object, Objects, Shape
from modelmill.serve.complaint import complaint
from modelmill.serve.schema import (
    MAX_TOP,
    WHOLE,
    ChatRequest,
    Choice,
    Drawn,
    Function,
    Named,
    ResponseFormat,
    Tool,
    check_functions,
)

LOGPROBS = "message.output_text.logprobs"
Text = Annotated[str, Field(max_length=10 << 20)]
Status = Literal["in_progress", "completed", "incomplete"]


class Part(Shape):
    """A piece of a message's content."""

    type: Literal["input_text", "output_text", "text", "refusal", "input_image"]
    text: Text | None = None
    refusal: Text | None = None
    image_url: str | None = None
    detail: Literal["low", "high", "auto"] | None = None
    annotations: Anything | None = None
    logprobs: Anything | None = None

    def as_chat(self) -> dict[str, Any]:
        """As a part of a chat message. Raises RequestError."""
        if self.type == "input_image":
            if self.image_url is None:
                raise RequestError("an input_image needs its image_url (a data: URL); files are not kept here")
            detail = {"detail": self.detail} if self.detail else {}
            return {"type": "image_url", "image_url": {"url": self.image_url, **detail}}
        text = self.refusal if self.type == "refusal" else self.text
        if text is None:
            raise RequestError(f"a part of type {self.type} needs its text")
        return {"type": "text", "text": text}


Parts = Annotated[list[Part], STOPS, Field(max_length=MAX_ITEMS)]


class MessageItem(Shape):
    """A turn."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Parts
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(Shape):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    arguments: Text
    id: str | None = None
    status: Status | None = None


class OutputItem(Shape):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    output: Text | Parts
    id: str | None = None
    status: Status | None = None


class ReasoningItem(Shape):
    """What another model thought: taken, not used."""

    type: Literal["reasoning"]
    summary: Anything
    id: str | None = None
    content: Anything | None = None
    encrypted_content: str | None = None
    status: Status | None = None


Item = MessageItem | CallItem | OutputItem | ReasoningItem
_KINDS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}


class FlatTool(Function):
    """A function that may be called."""

    type: Literal["function"]


class FlatChoice(Shape):
    """This function."""

    type: Literal["function"]
    name: str


class Allowed(Shape):
    """Some of the tools, and whether one of them has to be called."""

    type: Literal["allowed_tools"]
    mode: Literal["none", "auto", "required"] = "auto"
    tools: Annotated[list[FlatChoice], STOPS] = Field(min_length=1, max_length=128)


class Format(Shape):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, min_length=1, max_length=256)
    schema_: Object | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    def as_chat(self) -> ResponseFormat:
        """As a response_format. Raises RequestError."""
        if self.type != "json_schema":
            if self.name is not None or self.schema_ is not None:
                raise RequestError(f"text.format: name and schema belong to json_schema, not to {self.type}")
            return ResponseFormat(type=self.type)
        if self.name is None or self.schema_ is None:
            raise RequestError("text.format: json_schema needs a name and a schema")
        schema = {"name": self.name, "schema": self.schema_, "strict": self.strict, "description": self.description}
        return ResponseFormat.model_validate({"type": self.type, "json_schema": schema})


class TextConfig(Shape):
    """verbosity: taken, not used."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Shape):
    """Taken, not used."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(Shape):
    """Taken, not used."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Drawn):
    """POST /v1/responses."""

    input: Text | Objects = Field(description="a text, or items: messages, calls and what they returned")
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=WHOLE)
    text: TextConfig | None = None
    tools: Annotated[list[FlatTool], STOPS] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | Allowed | None = Field(
        None,
        description='"none", "auto", "required", {"type": "function", "name": …} or {"type": "allowed_tools", …}',
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    include: Annotated[list[str], STOPS] | None = Field(None, max_length=16)
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | Object | None = None
    prompt: Object | None = None
    # taken and not used
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(None, ge=1, le=WHOLE)
    reasoning: ReasoningConfig | None = None
    stream_options: ResponseStreamOptions | None = None
    prompt_cache_retention: str | None = None

    def check(self) -> None:
        """Raises RequestError for what is not offered."""
        if not self.input:
            raise RequestError("input is empty; give a text or at least one item")
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise RequestError(f"{name} is not offered: nothing is kept here; send the earlier items in input")
        if self.prompt is not None:
            raise RequestError("prompt is not offered: no templates are kept here; send instructions and input")
        if self.background:
            raise RequestError("background is not offered; use stream")
        if self.truncation == "auto":
            raise RequestError("truncation auto is not offered: an input that is too long is refused")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for stream: true")
        unknown = [each for each in self.include or () if each not in (LOGPROBS, "reasoning.encrypted_content")]
        if unknown:
            raise RequestError(f"include names {unknown[0][:60]!r}, which is not offered; {LOGPROBS} is")

    @property
    def tells_logprobs(self) -> bool:
        """Whether log-probabilities are wanted."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def as_chat(self) -> ChatRequest:
        """The chat request with the same meaning. Raises RequestError."""
        self.check()
        check_functions(self.tools or ())
        shared = {name: getattr(self, name) for name in Drawn.model_fields}
        tools, choice = self._tools()
        format = None if self.text is None or self.text.format is None else self.text.format.as_chat()
        return ChatRequest(
            **shared,
            messages=messages_of(self.input, self.instructions),
            max_completion_tokens=self.max_output_tokens,
            response_format=format,
            tools=tools,
            tool_choice=choice,
            logprobs=True if self.tells_logprobs else None,
            top_logprobs=self.top_logprobs if self.tells_logprobs else None,
            parallel_tool_calls=self.parallel_tool_calls,
        )

    def _tools(self) -> tuple[list[Tool] | None, Literal["none", "auto", "required"] | Choice | None]:
        tools = [
            Tool(type="function", function=Function(**tool.model_dump(exclude={"type"}))) for tool in self.tools or ()
        ]
        choice = self.tool_choice
        if isinstance(choice, Allowed):
            names = {each.name for each in choice.tools}
            if names - {tool.function.name for tool in tools}:
                raise RequestError("tool_choice names a function that is not among the tools")
            return [tool for tool in tools if tool.function.name in names], choice.mode
        if isinstance(choice, FlatChoice):
            return tools or None, Choice(type="function", function=Named(name=choice.name))
        return tools or None, choice


def messages_of(given: str | list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Items as chat messages: calls join the turn they belong to. Raises RequestError naming the item at fault."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for index, raw in enumerate(given):
        item = _item(raw, f"input[{index}]")
        try:
            _append(messages, item)
        except RequestError as error:
            raise RequestError(f"input[{index}]: {error}") from None
    if all(message["role"] == "system" for message in messages):
        raise RequestError("input holds no turn; give at least one message")
    return messages


def _append(messages: list[dict[str, Any]], item: Item) -> None:
    if isinstance(item, MessageItem):
        messages.append({"role": item.role, "content": _content(item.content)})
    elif isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, OutputItem):
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})


def _content(given: str | list[Part]) -> str | list[dict[str, Any]]:
    return given if isinstance(given, str) else [part.as_chat() for part in given]


def _item(raw: Mapping[str, Any], where: str) -> Item:
    kind = raw.get("type", "message")
    shape = _KINDS.get(kind) if isinstance(kind, str) else None
    if shape is None:
        raise RequestError(f"{where}: items of type {str(kind)[:40]!r} are not offered; there are {', '.join(_KINDS)}")
    try:
        return shape.model_validate(raw)
    except ValidationError as error:
        _, line = complaint(error.errors(include_url=False, include_input=False), shape)
        whole = "the request's body"  # the item is at fault as a whole
        told = line.removeprefix(whole) if line.startswith(whole) else f".{line}"
        raise RequestError(where + told) from None
