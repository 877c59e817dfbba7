"""What requests may say, in OpenAI's shapes, strictly: a field we do not know or a value of another
kind is an error.

Fields that some clients send and that change no answer (metadata, user, …) are taken and not used;
those that would change it and are not offered are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator

from modelmill.core.errors import RequestError
from modelmill.core.types import MAX_BIAS, MAX_N, MAX_STOPS, Grammar, SamplingParams
from modelmill.serve.strict_models import (
    FAIL_FAST,
    MAX_ITEMS,
    JsonObject,
    JsonObjectList,
    Metadata,
    StrictModel,
    limit_keys,
)
from modelmill.text.grammar import check_grammar as usable
from modelmill.text.messages import check_data
from modelmill.text.tool_grammar import forced_call_grammar

MAX_PROMPTS = 1024
MAX_TOP_LOGPROBS = 20
MAX_INT32 = 2**31 - 1


class StructuredOutputs(StrictModel):
    """What an answer must be; one of them."""

    json_: JsonObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], FAIL_FAST, Field(max_length=MAX_ITEMS)] | None = None
    grammar: str | None = Field(None, description="in Lark's notation, as llguidance reads it")

    def to_grammar(self) -> Grammar:
        """Raises RequestError unless exactly one is given."""
        check_data(self.json_, "structured_outputs: the JSON schema")
        given = [
            Grammar(kind, value if isinstance(value, str) else json.dumps(value))
            for kind, value in (
                ("json", self.json_),
                ("regex", self.regex),
                ("choice", self.choice),
                ("lark", self.grammar),
            )
            if value is not None
        ]
        if len(given) != 1:
            raise RequestError("structured_outputs takes one of json, regex, choice and grammar")
        return given[0]


class JsonSchema(StrictModel):
    """response_format's json_schema.

    strict and description change nothing: a schema is always kept to.
    """

    name: str = Field(min_length=1, max_length=256)
    schema_: JsonObject | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """text, some JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def to_grammar(self) -> Grammar | None:
        """None for plain text. Raises RequestError."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            needs = "needs" if self.json_schema is None else "takes no"
            raise RequestError(f"response_format of type {self.type} {needs} json_schema")
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        check_data(schema, "response_format: the JSON schema")
        return Grammar("json", json.dumps({} if schema is None else schema))


class StreamOptions(StrictModel):
    """include_usage: one more chunk at the end with the counts.

    include_obfuscation: taken, not used.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


LogitBias = Annotated[dict[str, float], limit_keys(MAX_BIAS), Field(max_length=MAX_BIAS)]


class SamplingFields(StrictModel):
    """How an answer is drawn: what completions, conversations and responses have in common."""

    model: str = Field(max_length=1024)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: str | Annotated[list[str], FAIL_FAST] | None = Field(
        None, max_length=4096, description="a text, or a list of texts"
    )
    stream: bool | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    user: str | None = Field(None, max_length=4096)
    # extras of ours and of the engines that people come from
    top_k: int | None = Field(None, ge=-1, le=MAX_INT32)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT32)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], FAIL_FAST] | None = Field(None, max_length=MAX_STOPS)
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = Field(None, max_length=1024)
    structured_outputs: StructuredOutputs | None = None
    # taken and not used
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS or not all(stops):
            raise ValueError(f"takes up to {MAX_STOPS} texts that are not empty")
        return value


class GenerationFields(SamplingFields):
    """What completions and conversations have in common."""

    n: int | None = Field(None, ge=1, le=MAX_N)
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    metadata: Metadata | None = Field(None, description="taken, not used")

    def make_sampling_params(self, **more: Any) -> SamplingParams:
        """As the engine's SamplingParams. Raises RequestError."""
        names = (
            "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names}
        return SamplingParams(
            **given,
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
        """What the answer must be. Raises RequestError."""
        asked = None if self.response_format is None else self.response_format.to_grammar()
        other = None if self.structured_outputs is None else self.structured_outputs.to_grammar()
        if asked is not None and other is not None:
            raise RequestError(
                "response_format and structured_outputs ask for two things; give one of them"
            )
        return other if asked is None else asked

    def validated_grammar(self) -> Grammar | None:
        """``grammar``, of which is known that it can be used. Raises RequestError."""
        found = self.grammar()
        if found is None:
            return None
        if self.ignore_eos:
            raise RequestError(
                "ignore_eos has no meaning with structured output or a forced call; leave it out"
            )
        try:
            usable(found)
        except RequestError as error:
            raise RequestError(f"{self._grammar_field}: {error}") from None
        return found

    @property
    def _grammar_field(self) -> str:
        """The field that says what the answer must be."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_stream(self) -> None:
        """stream_options without stream is a mistake."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for stream: true")


TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT32)]], FAIL_FAST]
TextList = Annotated[list[str], FAIL_FAST]
TokenIdLists = Annotated[list[TokenIds], FAIL_FAST]


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: str | TextList | TokenIds | TokenIdLists = Field(
        description="a text, a list of texts, token ids, or lists of them"
    )
    max_tokens: int | None = Field(16, ge=0, le=MAX_INT32)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    suffix: str | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or many. Raises RequestError for empty ones."""
        raw = self.prompt
        listed: list[Any] = (
            [raw] if isinstance(raw, str) or (raw and isinstance(raw[0], int)) else list(raw)
        )
        if not listed or any(len(each) == 0 for each in listed):
            raise RequestError("prompt is empty; give at least one token")
        if len(listed) > MAX_PROMPTS:
            raise RequestError(f"prompt holds {len(listed)} prompts; up to {MAX_PROMPTS} are taken")
        return listed

    def check(self) -> None:
        """Raises RequestError for combinations that are not offered."""
        self.check_stream()
        if self.suffix is not None:
            raise RequestError(
                "suffix is not offered: these models continue a text, they do not fill it in"
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of must equal n: answers are not ranked")

    def sampling_params(self) -> SamplingParams:
        """As the engine's SamplingParams."""
        scored = self.logprobs if self.echo else None
        limit = 16 if self.max_tokens is None else self.max_tokens
        return self.make_sampling_params(
            max_tokens=limit, logprobs=self.logprobs, prompt_logprobs=scored
        )


class FunctionDefinition(StrictModel):
    """What a tool is. strict changes nothing: forced calls always keep to the parameters."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = Field(None, max_length=65536)
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A function that may be called."""

    type: Literal["function"]
    function: FunctionDefinition


def check_functions(functions: Iterable[FunctionDefinition]) -> None:
    """Raises RequestError for parameters that JSON cannot express, or that are nested beyond
    reason.
    """
    for function in functions:
        check_data(function.parameters, f"tools: the schema of {function.name}")


class NamedFunction(StrictModel):
    """The function of a tool_choice."""

    name: str


class NamedToolChoice(StrictModel):
    """tool_choice: this function."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

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

    def check(self) -> None:
        """Raises RequestError for combinations that are not offered."""
        self.check_stream()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true")
        names = [tool.function.name for tool in self.tools or ()]
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise RequestError("tool_choice needs tools")
        if len(set(names)) < len(names):
            raise RequestError("tools hold two functions of one name")
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
        """Whether the answer has to be a call."""
        return bool(self.tools) and self.tool_choice not in (None, "none", "auto")

    def grammar(self) -> Grammar | None:
        """What the answer must be: a call that is forced, or what was asked for.

        Raises RequestError.
        """
        found = super().grammar()
        if not self.forces_call:
            return found
        if found is not None:
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
        """As the engine's SamplingParams."""
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
    """POST /detokenize."""

    model: str | None = Field(None, max_length=1024)
    tokens: TokenIds


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every error."""

    error: ErrorDetail


def _parse_logit_bias(given: Mapping[str, float] | None) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in (given or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise RequestError("logit_bias takes token ids as keys")
        out[int(key)] = value
    return out
