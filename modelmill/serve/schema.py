"""Request models in OpenAI's format, validated strictly: unknown fields and wrong types are errors.

Fields that some clients send and that do not change the output (metadata, user, …) are accepted and
ignored; unsupported fields that would change it are rejected by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator

from modelmill.core.errors import RequestError
from modelmill.core.types import (
    MAX_BIAS,
    MAX_INT32,
    MAX_N,
    MAX_STOPS,
    Grammar,
    SamplingParams,
    sampling_range,
)
from modelmill.serve.strict_models import (
    FAIL_FAST,
    MAX_ITEMS,
    JsonObject,
    JsonObjectList,
    Metadata,
    StrictModel,
    limit_keys,
)
from modelmill.text.grammar import check_grammar
from modelmill.text.messages import check_data
from modelmill.text.tool_grammar import forced_call_grammar

MAX_PROMPTS = 1024
MAX_TOP_LOGPROBS = 20


class StructuredOutputs(StrictModel):
    """Constraint on the output; one of the fields."""

    json_: JsonObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], FAIL_FAST, Field(max_length=MAX_ITEMS)] | None = None
    grammar: str | None = Field(None, description="in Lark's notation, as llguidance reads it")

    def to_grammar(self) -> Grammar:
        """Return the grammar.

        Raises:
            RequestError: not exactly one field is set.
        """
        check_data(self.json_, "structured_outputs: the JSON schema")
        grammars = [
            Grammar(grammar_type, value if isinstance(value, str) else json.dumps(value))
            for grammar_type, value in (
                ("json", self.json_),
                ("regex", self.regex),
                ("choice", self.choice),
                ("lark", self.grammar),
            )
            if value is not None
        ]
        if len(grammars) != 1:
            raise RequestError("structured_outputs takes one of json, regex, choice and grammar")
        return grammars[0]


class JsonSchema(StrictModel):
    """response_format's json_schema.

    strict and description have no effect: a schema is always enforced.
    """

    name: str = Field(min_length=1, max_length=256)
    schema_: JsonObject | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """Plain text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def to_grammar(self) -> Grammar | None:
        """Return the grammar; None for plain text.

        Raises:
            RequestError: the fields contradict each other.
        """
        if (self.json_schema is not None) != (self.type == "json_schema"):
            needs = "needs" if self.json_schema is None else "takes no"
            raise RequestError(f"response_format of type {self.type} {needs} json_schema")
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        check_data(schema, "response_format: the JSON schema")
        return Grammar("json", json.dumps({} if schema is None else schema))


class StreamOptions(StrictModel):
    """include_usage: one more chunk at the end with the usage.

    include_obfuscation: accepted and ignored.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


LogitBias = Annotated[dict[str, float], limit_keys(MAX_BIAS), Field(max_length=MAX_BIAS)]


def sampling_field(name: str, most: float | None = None) -> Any:
    """An optional field with the range of that field of SamplingParams.

    Args:
        name: The field of SamplingParams.
        most: A lower upper bound, where OpenAI's API has one.
    """
    limits = sampling_range(name)
    low, high = (
        int(value) if value == int(value) else value for value in (limits.low, limits.high)
    )
    le = high if most is None else most
    return Field(None, gt=low, le=le) if limits.above_low else Field(None, ge=low, le=le)


class SamplingFields(StrictModel):
    """Sampling fields of completions, chat completions and responses."""

    model: str = Field(max_length=1024)
    temperature: float | None = sampling_field("temperature", most=2)
    top_p: float | None = sampling_field("top_p")
    stop: str | Annotated[list[str], FAIL_FAST] | None = Field(
        None, max_length=4096, description="a string, or a list of strings"
    )
    stream: bool | None = None
    seed: int | None = sampling_field("seed", most=2**63 - 1)
    presence_penalty: float | None = sampling_field("presence_penalty")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    logit_bias: LogitBias | None = None
    user: str | None = Field(None, max_length=4096)
    # extensions, also of other engines
    top_k: int | None = sampling_field("top_k")
    min_p: float | None = sampling_field("min_p")
    repetition_penalty: float | None = sampling_field("repetition_penalty")
    min_tokens: int | None = sampling_field("min_tokens")
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], FAIL_FAST] | None = Field(None, max_length=MAX_STOPS)
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = Field(None, max_length=1024)
    structured_outputs: StructuredOutputs | None = None
    # accepted and ignored
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS or not all(stops):
            raise ValueError(f"must have up to {MAX_STOPS} strings that are not empty")
        return value


class GenerationFields(SamplingFields):
    """Fields of completions and chat completions."""

    n: int | None = sampling_field("n")
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    metadata: Metadata | None = Field(None, description="accepted and ignored")

    def make_sampling_params(self, **more: Any) -> SamplingParams:
        """Convert to SamplingParams, with ``more`` fields.

        Raises:
            RequestError: a value is invalid.
        """
        names = (
            "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        return SamplingParams(
            **values,
            n=self.n or 1,
            stop=self.stop or (),  # type: ignore[arg-type]
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=self.min_tokens or 0,
            logit_bias=_parse_logit_bias(self.logit_bias),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
            include_stop=bool(self.include_stop_str_in_output),
            **more,
        )

    def grammar(self) -> Grammar | None:
        """Return the constraint on the output, if any.

        Raises:
            RequestError: the fields contradict each other.
        """
        grammar = None if self.response_format is None else self.response_format.to_grammar()
        other = None if self.structured_outputs is None else self.structured_outputs.to_grammar()
        if grammar is not None and other is not None:
            raise RequestError(
                "response_format and structured_outputs exclude each other; give one of them"
            )
        return other if grammar is None else grammar

    def validated_grammar(self) -> Grammar | None:
        """Return ``grammar`` after checking that it compiles.

        Raises:
            RequestError: it does not.
        """
        grammar = self.grammar()
        if grammar is None:
            return None
        if self.ignore_eos:
            raise RequestError(
                "ignore_eos has no meaning with structured output or a forced call; leave it out"
            )
        try:
            check_grammar(grammar)
        except RequestError as error:
            raise RequestError(f"{self._grammar_field}: {error}") from None
        return grammar

    @property
    def _grammar_field(self) -> str:
        """The field that constrains the output."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_stream(self) -> None:
        """Raise RequestError for stream_options without stream."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for stream: true")


TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT32)]], FAIL_FAST]
TextList = Annotated[list[str], FAIL_FAST]
TokenIdLists = Annotated[list[TokenIds], FAIL_FAST]


def list_prompts(
    prompts: str | Sequence[Any], name: str, noun: str, limit: int
) -> list[str | list[int]]:
    """The prompts of a field as a list, also if it has only one.

    Args:
        prompts: the value of the field.
        name: of the field, for messages.
        noun: what its items are, for messages.
        limit: of items.

    Raises:
        RequestError: a prompt is empty, or there are too many.
    """
    single = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
    prompt_list: list[Any] = [prompts] if single else list(prompts)
    if not prompt_list or any(len(each) == 0 for each in prompt_list):
        raise RequestError(f"{name} is empty; give at least one token")
    if len(prompt_list) > limit:
        raise RequestError(f"{name} has {len(prompt_list)} {noun}; the limit is {limit}")
    return prompt_list


class CompletionRequest(GenerationFields):
    """Request body of POST /v1/completions."""

    prompt: str | TextList | TokenIds | TokenIdLists = Field(
        description="a string, a list of strings, token ids, or lists of them"
    )
    max_tokens: int | None = Field(16, ge=0, le=MAX_INT32)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    suffix: str | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list.

        Raises:
            RequestError: a prompt is empty, or there are too many.
        """
        return list_prompts(self.prompt, "prompt", "prompts", MAX_PROMPTS)

    def check(self) -> None:
        """Raise RequestError for combinations that are not supported."""
        self.check_stream()
        if self.suffix is not None:
            raise RequestError(
                "suffix is not supported: these models continue a text, they do not fill it in"
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of must equal n: answers are not ranked")

    def sampling_params(self) -> SamplingParams:
        """Convert to SamplingParams."""
        prompt_logprobs = self.logprobs if self.echo else None
        limit = 16 if self.max_tokens is None else self.max_tokens
        return self.make_sampling_params(
            max_tokens=limit, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs
        )


class FunctionDefinition(StrictModel):
    """A function. A forced call always matches the parameters, another one if strict is true."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = Field(None, max_length=65536)
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A function that may be called."""

    type: Literal["function"]
    function: FunctionDefinition


def check_functions(functions: Iterable[FunctionDefinition]) -> None:
    """Check the parameter schemas.

    Raises:
        RequestError: a schema is not JSON, or is nested too deeply.
    """
    for function in functions:
        check_data(function.parameters, f"tools: the schema of {function.name}")


class NamedFunction(StrictModel):
    """The function of a tool_choice."""

    name: str


class NamedToolChoice(StrictModel):
    """tool_choice: call this function."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationFields):
    """Request body of POST /v1/chat/completions."""

    messages: JsonObjectList = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[Tool], FAIL_FAST] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = Field(
        None,
        description='"none", "auto", "required" or {"type": "function", "function": {"name": …}}',
    )
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[str], FAIL_FAST] | None = Field(None, max_length=16)
    reasoning_effort: str | None = None
    verbosity: str | None = None
    chat_template_kwargs: JsonObject | None = Field(
        None, description="variables of the chat template, such as enable_thinking"
    )
    thinking_token_budget: int | None = Field(
        None, ge=0, le=MAX_INT32, description="maximum tokens of the thinking"
    )

    def check(self) -> None:
        """Raise RequestError for combinations that are not supported."""
        self.check_stream()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true")
        names = [tool.function.name for tool in self.tools or ()]
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise RequestError("tool_choice needs tools")
        if len(set(names)) < len(names):
            raise RequestError("tools has two functions of the same name")
        if (
            isinstance(self.tool_choice, NamedToolChoice)
            and self.tool_choice.function.name not in names
        ):
            raise RequestError("tool_choice names a function that is not among the tools")
        if self.modalities not in (None, ["text"]):
            raise RequestError('modalities must be ["text"]')

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that may be called."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def forces_call(self) -> bool:
        """Whether the output must be a tool call."""
        return bool(self.tools) and self.tool_choice not in (None, "none", "auto")

    def grammar(self) -> Grammar | None:
        """Return the constraint on the output: of a forced call, or as requested.

        Raises:
            RequestError: the fields contradict each other.
        """
        grammar = super().grammar()
        if not self.forces_call:
            return grammar
        if grammar is not None:
            raise RequestError(
                "response_format has no meaning where a call is forced; give one of them"
            )
        name = (
            self.tool_choice.function.name
            if isinstance(self.tool_choice, NamedToolChoice)
            else None
        )
        return forced_call_grammar(
            self.offered_tools, name, several=name is None and self.parallel_tool_calls is True
        )

    @property
    def _grammar_field(self) -> str:
        return "tools" if self.forces_call else super()._grammar_field

    def sampling_params(self) -> SamplingParams:
        """Convert to SamplingParams."""
        limit = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        return self.make_sampling_params(
            max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None
        )


class TokenizeRequest(StrictModel):
    """POST /tokenize: a prompt, or messages through the chat template."""

    model: str | None = Field(None, max_length=1024)
    prompt: str | None = None
    messages: JsonObjectList | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(StrictModel):
    """Request body of POST /detokenize."""

    model: str | None = Field(None, max_length=1024)
    tokens: TokenIds


class ErrorDetail(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Body of every error."""

    error: ErrorDetail


def _parse_logit_bias(logit_bias: Mapping[str, float] | None) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in (logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise RequestError("logit_bias takes token ids as keys")
        out[int(key)] = value
    return out
