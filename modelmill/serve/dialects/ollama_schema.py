"""Requests of Ollama's API and their conversion to chat and completion requests."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from modelmill.core.errors import RequestError
from modelmill.core.types import MAX_INT32
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.compatibility_fields import off_only_field, only_off_values
from modelmill.serve.completion_schema import CompletionRequest
from modelmill.serve.dialects.ollama_options import OllamaOptions
from modelmill.serve.discriminated_unions import make_converted_request, parse_object
from modelmill.serve.engine_request_fields import EngineRequestFields
from modelmill.serve.generation_schema import MAX_TOP_LOGPROBS
from modelmill.serve.prompt_fields import TextList
from modelmill.serve.sampling_schema import UnlimitedTemperature
from modelmill.serve.strict_models import FAIL_FAST, JsonObject, JsonObjectList, StrictModel, Text
from modelmill.serve.structured_outputs_schema import JsonSchema, ResponseFormat
from modelmill.serve.tool_schema import MAX_TOOLS, Tool
from modelmill.text.answer_pieces import make_openai_tool_call

LongText = Annotated[str, Field(max_length=10 << 20)]
Images = Annotated[list[str], FAIL_FAST, Field(max_length=64)]
DEFAULT_TAG = ":latest"
_IMAGE_TYPES = {"iVBOR": "png", "/9j/": "jpeg", "R0lGO": "gif", "UklGR": "webp"}
"""How the base64 of an image begins → its type."""


class OllamaFunction(StrictModel):
    """A function that the model called, with its arguments as an object."""

    name: str = Field(min_length=1, max_length=128)
    arguments: JsonObject
    index: int | None = None
    description: str | None = None


class OllamaToolCall(StrictModel):
    """A call that the model made."""

    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(StrictModel):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: LongText | None = None
    thinking: LongText | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaToolCall], FAIL_FAST] | None = Field(None, max_length=128)
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


class OllamaConvertedChat(UnlimitedTemperature, ChatRequest):
    """The chat request that one of Ollama's becomes."""


class OllamaConvertedCompletion(UnlimitedTemperature, CompletionRequest):
    """The completion request that one of Ollama's becomes."""


class OllamaModelFields(EngineRequestFields):
    """Fields of every request that runs a model."""

    model: str = Field(max_length=1024)
    options: OllamaOptions | None = None


class OllamaGenerationFields(OllamaModelFields):
    """Fields of /api/chat and /api/generate."""

    format: str | JsonObject | None = Field(None, description='"json" or a JSON schema')
    stream: bool | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        None, description='true, false, "low", "medium", "high" or "max"'
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    # Ollama cuts or shifts a prompt that is too long; here it is refused
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed, which is Ollama's default."""
        return self.stream is not False

    @property
    def thinks(self) -> bool | None:
        """Whether the model shall think; None: as its chat template does by itself."""
        return None if self.think is None else self.think is not False

    @property
    def effort(self) -> str | None:
        """How much the model shall think; None: as its chat template has it by itself."""
        return self.think if isinstance(self.think, str) else None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return bool(self.logprobs or self.top_logprobs)

    def rename_error_fields(self, text: str) -> str:
        """Rewrite an error about the converted request to name the fields of this API."""
        return text.replace("response_format", "format")

    def response_format(self) -> ResponseFormat | None:
        """The constraint on the answer.

        Raises:
            RequestError: ``format`` is another string.
        """
        if isinstance(self.format, dict):
            schema = JsonSchema.model_validate({"name": "format", "schema": self.format})
            return ResponseFormat.model_validate({"type": "json_schema", "json_schema": schema})
        if self.format not in (None, "", "json"):
            raise RequestError('format must be "json" or a JSON schema')
        return ResponseFormat.model_validate({"type": "json_object"}) if self.format else None

    def shared_fields(self) -> dict[str, Any]:
        """Fields that chat and completion requests share."""
        return {
            "model": self.model,
            "response_format": self.response_format(),
            "cache_salt": self.cache_salt,
            **(self.options.sampling_fields() if self.options is not None else {}),
        }

    def make_chat_request(self, messages: list[dict[str, Any]], **fields: Any) -> ChatRequest:
        """Make the chat request of a conversation."""
        return make_converted_request(
            OllamaConvertedChat,
            {
                "messages": messages,
                "logprobs": self.wants_logprobs or None,
                "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
                **self.shared_fields(),
                **fields,
            },
        )


class OllamaChatRequest(OllamaGenerationFields):
    """Request body of POST /api/chat."""

    messages: JsonObjectList = Field(default_factory=list)
    tools: Annotated[list[JsonObject], FAIL_FAST] | None = Field(None, max_length=MAX_TOOLS)

    def image_field_paths(self) -> Iterator[str]:
        """The fields of the pictures, in order."""
        for index, message in enumerate(self.messages):
            count = len(message.get("images") or ())
            yield from (f"messages[{index}].images[{number}]" for number in range(count))

    def to_chat_request(self) -> ChatRequest:
        """Convert to the equivalent chat request.

        Raises:
            RequestError: a field is not supported or invalid.
        """
        tools = [
            parse_object({"type": "function", **raw}, f"tools[{index}]", Tool)
            for index, raw in enumerate(self.tools or ())
        ]
        messages = to_chat_messages(self.messages)
        last = messages[-1] if messages else {}
        begins_answer = last.get("role") == "assistant" and not last.get("tool_calls")
        return self.make_chat_request(
            messages, tools=tools or None, continue_final_message=begins_answer or None
        )


class OllamaGenerateRequest(OllamaGenerationFields):
    """Request body of POST /api/generate."""

    prompt: LongText | None = None
    system: LongText | None = None
    images: Images | None = None
    raw: bool | None = Field(None, description="no chat template; control tokens are parsed")
    suffix: LongText | None = None
    # refused unless empty
    template: str | None = None
    context: Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT32)]], FAIL_FAST] | None = None

    def check(self) -> None:
        """Raise RequestError for fields that are not supported."""
        if self.template:
            raise RequestError("template is not supported; use raw: true with the whole prompt")
        if self.context:
            raise RequestError("context is not supported; send the conversation to /api/chat")
        if self.raw and (self.system or self.images):
            raise RequestError("system and images have no meaning with raw: true; leave them out")

    @property
    def skips_chat_template(self) -> bool:
        """Whether the prompt goes to the model without a chat template."""
        return bool(self.raw) or bool(self.suffix)

    def image_field_paths(self) -> Iterator[str]:
        """The fields of the pictures, in order."""
        return (f"images[{number}]" for number in range(len(self.images or ())))

    def to_chat_request(self) -> ChatRequest:
        """Convert to the equivalent chat request; raises RequestError."""
        self.check()
        messages = [{"role": "system", "content": self.system}] if self.system else []
        user = OllamaMessage.model_validate(
            {"role": "user", "content": self.prompt, "images": self.images}
        )
        return self.make_chat_request([*messages, _to_chat_message(user)])

    def to_completion_request(self) -> CompletionRequest:
        """Convert to the equivalent completion request; raises RequestError.

        Its warnings say what has no effect without a chat template.
        """
        self.check()
        if self.images:
            raise RequestError("images have no place in a prompt without a chat template")
        completion = make_converted_request(
            OllamaConvertedCompletion,
            {
                "prompt": self.prompt or "",
                "suffix": self.suffix or None,
                "parse_special": True if self.raw else None,
                "logprobs": (self.top_logprobs or 0) if self.wants_logprobs else None,
                "n_predict": -1,
                **self.shared_fields(),
            },
        )
        completion.add_warnings(
            [
                f"{name}: it has no effect on a prompt without a chat template"
                for name, value in (("system", self.system), ("think", self.think))
                if value
            ]
        )
        return completion


class OllamaEmbedRequest(OllamaModelFields):
    """Request body of POST /api/embed."""

    input: Text | TextList | None = Field(
        None, description="a string or a list of strings; nothing: the model is loaded"
    )
    truncate: bool | None = None
    dimensions: int | None = Field(None, ge=1, le=MAX_INT32)

    def inputs(self) -> list[str]:
        """The inputs as a list; an empty text is none, an empty text of a list is an error."""
        if isinstance(self.input, str):
            return [self.input] if self.input else []
        return list(self.input or ())


class OllamaEmbeddingsRequest(OllamaModelFields):
    """Request body of POST /api/embeddings, the older form."""

    prompt: Text | None = Field(None, description="nothing: the model is loaded")


class OllamaShowRequest(StrictModel):
    """Request body of POST /api/show."""

    model: str | None = Field(None, max_length=1024)
    name: str | None = Field(None, max_length=1024)
    verbose: bool | None = None
    # Ollama's Go client sends these in every request
    system: Annotated[str | None, only_off_values("")] = off_only_field("an empty text")
    template: Annotated[str | None, only_off_values("")] = off_only_field("an empty text")
    options: Annotated[JsonObject | None, only_off_values({})] = off_only_field("an empty object")


def to_chat_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert a conversation to chat messages.

    Ollama's results name a function, not a call: each is given the id of the first call of that
    name without a result.

    Raises:
        RequestError: a message is invalid; the text names it.
    """
    chat = []
    open_calls: deque[tuple[str, str]] = deque()
    for index, raw in enumerate(messages):
        message = parse_object(raw, f"messages[{index}]", OllamaMessage)
        converted = _to_chat_message(message)
        for number, call in enumerate(converted.get("tool_calls", ())):
            call["id"] = call["id"] or f"call_{index}_{number}"
            open_calls.append((call["id"], call["function"]["name"]))
        if message.role == "tool":
            converted["tool_call_id"] = message.tool_call_id or _pop_open_tool_call_id(
                open_calls, message.tool_name or message.name
            )
        chat.append(converted)
    return chat


def _pop_open_tool_call_id(open_calls: deque[tuple[str, str]], name: str | None) -> str:
    call = next((each for each in open_calls if name in (None, each[1])), None)
    if call is None:
        return "call_0"
    open_calls.remove(call)
    return call[0]


def _to_chat_message(message: OllamaMessage) -> dict[str, Any]:
    content: Any = message.content or ""
    if message.images:
        images = [
            {"type": "image_url", "image_url": {"url": _image_data_url(data)}}
            for data in message.images
        ]
        text = [{"type": "text", "text": content}] if content else []
        content = [*images, *text]
    out: dict[str, Any] = {"role": message.role, "content": content}
    if message.thinking:
        out["reasoning_content"] = message.thinking
    if message.tool_calls:
        out["tool_calls"] = [
            make_openai_tool_call(
                call.id,
                call.function.name,
                json.dumps(call.function.arguments, ensure_ascii=False),
            )
            for call in message.tool_calls
        ]
        out["content"] = content or None
    return out


def _image_data_url(data: str) -> str:
    """A data URL of base64; Ollama's images have no type."""
    if data.startswith("data:"):
        return data
    image_type = next((each for head, each in _IMAGE_TYPES.items() if data.startswith(head)), "png")
    return f"data:image/{image_type};base64,{data}"
