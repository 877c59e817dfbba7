"""Request models in OpenAI's format, validated strictly: unknown fields and wrong types are errors.

Fields that some clients send and that do not change the output (metadata, user, …) are accepted and
ignored; unsupported fields that would change it are rejected by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PrivateAttr, field_validator, model_validator

from modelmill.core.errors import RequestError
from modelmill.core.types import (
    MAX_BIAS,
    MAX_INT32,
    MAX_N,
    MAX_STOPS,
    TOKEN_IDS,
    Grammar,
    SamplingParams,
    sampling_range,
)
from modelmill.serve.access.priority_field import PriorityField
from modelmill.serve.catalogue.keep_alive import KeepAliveField
from modelmill.serve.custom_tools import INPUT_SCHEMA
from modelmill.serve.message_keys import ChatMessages
from modelmill.serve.peer_fields import AccountFields, PeerFields, ignored
from modelmill.serve.schema_coercion import coerce_grammar
from modelmill.serve.strict_models import (
    FAIL_FAST,
    MAX_ITEMS,
    JsonObject,
    StrictModel,
    known_names,
    limit_keys,
)
from modelmill.text.gbnf import gbnf_grammar
from modelmill.text.grammar import check_grammar
from modelmill.text.messages import check_data
from modelmill.text.tool_grammar import forced_call_grammar

MAX_PROMPTS = 1024
MAX_TOP_LOGPROBS = 20
MAX_BAD_WORDS = 1024
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT32)]], FAIL_FAST]
TextList = Annotated[list[str], FAIL_FAST]
TokenIdLists = Annotated[list[TokenIds], FAIL_FAST]


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

    name, strict and description have no effect: a schema is always enforced.
    """

    name: str | None = Field(None, min_length=1, max_length=256)
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

    continuous_usage_stats: the usage so far in every chunk. include_obfuscation: accepted and
    ignored.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
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


class SamplingFields(AccountFields):
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
    keep_alive: KeepAliveField = None
    priority: PriorityField = None
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

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_nulls(cls, raw: Any) -> Any:
        """Drop unknown fields that are null: clients send all that they know (functions: null)."""
        if not isinstance(raw, dict) or None not in raw.values():
            return raw
        known = known_names(cls)
        return {key: each for key, each in raw.items() if each is not None or key in known}

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS or not all(stops):
            raise ValueError(f"must have up to {MAX_STOPS} strings that are not empty")
        return value


class GenerationFields(SamplingFields, PeerFields):
    """Fields of completions and chat completions."""

    n: int | None = sampling_field("n")
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    # extensions, as vLLM names them
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_INT32, description="keep the last so many tokens; -1: as many as fit"
    )
    bad_words: TextList | None = Field(None, max_length=MAX_BAD_WORDS)
    allowed_token_ids: TokenIds | None = Field(None, min_length=1)
    # extensions, as llama.cpp names them
    n_predict: int | None = Field(None, ge=-1, le=MAX_INT32, description="as max_tokens; -1: unset")
    json_schema: JsonObject | None = Field(None, description="as structured_outputs.json")
    grammar_: str | None = Field(None, alias="grammar", description="in GBNF")
    timings_per_token: bool | None = None
    cache_prompt: bool | None = Field(None, description="false: use no cached prefix")
    _warnings: list[str] = PrivateAttr(default_factory=list)

    def sampling_params(self) -> SamplingParams:
        """Convert to SamplingParams. Raises RequestError."""
        raise NotImplementedError

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
        grammars: dict[str, Grammar | None] = {}
        if self.response_format is not None:
            grammars["response_format"] = self.response_format.to_grammar()
        if self.structured_outputs is not None:
            grammars["structured_outputs"] = self.structured_outputs.to_grammar()
        if self.json_schema is not None:
            check_data(self.json_schema, "json_schema: the JSON schema")
            grammars["json_schema"] = Grammar("json", json.dumps(self.json_schema))
        if self.grammar_ is not None:
            grammars["grammar"] = gbnf_grammar(self.grammar_)
        if self.allowed_token_ids is not None:
            ids = sorted(set(self.allowed_token_ids))
            grammars["allowed_token_ids"] = Grammar(TOKEN_IDS, json.dumps(ids))
        names = [name for name, grammar in grammars.items() if grammar is not None]
        if len(names) > 1:
            raise RequestError(f"{names[0]} and {names[1]} exclude each other; give one of them")
        return grammars[names[0]] if names else None

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
        if grammar.grammar_type == TOKEN_IDS:
            return grammar
        try:
            check_grammar(grammar)
        except RequestError as error:
            first_error = f"{self._grammar_field}: {error}"
        else:
            return grammar
        coerced, reasons = coerce_grammar(grammar)
        try:
            if coerced is grammar:
                raise RequestError(first_error)
            check_grammar(coerced)
        except RequestError:
            raise RequestError(first_error) from None
        self._warnings.extend(f"{self._grammar_field}: {reason}" for reason in reasons)
        return coerced

    @property
    def warnings(self) -> list[str]:
        """What of the request was not enforced; known once its grammar has been validated."""
        return list(self._warnings)

    @property
    def _grammar_field(self) -> str:
        """The field that constrains the output."""
        names = (
            ("structured_outputs", "structured_outputs"),
            ("json_schema", "json_schema"),
            ("grammar_", "grammar"),
            ("allowed_token_ids", "allowed_token_ids"),
        )
        present = (name for field, name in names if getattr(self, field) is not None)
        return next(present, "response_format")

    def _max_tokens(self, limit: int | None, default: int | None) -> int | None:
        """The limit of the output: ``limit``, else n_predict, else the default."""
        limits = {"max_tokens", "max_completion_tokens"} & self.model_fields_set
        if self.n_predict is not None and not limits:
            return None if self.n_predict < 0 else self.n_predict
        return default if limit is None else limit

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every event of a stream has the usage so far."""
        return self.wants_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def check_stream(self) -> None:
        """Raise RequestError for stream_options without stream."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs is only for answers that are not streamed")


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
    suffix: str | None = Field(None, description="fill in the text between prompt and suffix")
    parse_special: bool | None = Field(
        None, description="control tokens in the prompt's text become their ids"
    )
    add_special_tokens: bool | None = Field(None, description="false: no BOS before the prompt")

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list.

        Raises:
            RequestError: a prompt is empty, or there are too many.
        """
        return list_prompts(self.prompt, "prompt", "prompts", MAX_PROMPTS)

    def check(self) -> None:
        """Raise RequestError for combinations that are not supported."""
        self.check_stream()
        if self.suffix is not None and (
            self.echo or not all(isinstance(each, str) for each in self.prompts())
        ):
            raise RequestError("suffix needs a prompt of text, and has no echo")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of must equal n: answers are not ranked")

    def sampling_params(self) -> SamplingParams:
        """Convert to SamplingParams."""
        prompt_logprobs = self.logprobs if self.echo else self.prompt_logprobs
        return self.make_sampling_params(
            max_tokens=self._max_tokens(self.max_tokens, 16),
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
        )


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
        check_data(function.parameters, f"tools: the schema of {function.name}")


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


class ChatRequest(GenerationFields):
    """Request body of POST /v1/chat/completions."""

    messages: ChatMessages = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[Tool | CustomTool], FAIL_FAST] | None = Field(None, max_length=128)
    tool_choice: (
        Literal["none", "auto", "required"]
        | NamedToolChoice
        | CustomToolChoice
        | AllowedToolChoice
        | None
    ) = Field(
        None,
        description='"none", "auto", "required", {"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}',
    )
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[str], FAIL_FAST] | None = Field(None, max_length=16)
    reasoning_effort: str | None = None
    verbosity: str | None = ignored("the model writes as it writes")
    # extensions: the prompt ends inside the last message, or without the start of an answer
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: JsonObject | None = Field(
        None, description="variables of the chat template, such as enable_thinking"
    )
    thinking_token_budget: int | None = Field(
        None, ge=0, le=MAX_INT32, description="maximum tokens of the thinking"
    )

    def check(self) -> None:
        """Raise RequestError for combinations that are not supported."""
        self.check_stream()
        self._check_final_message()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true")
        names = [tool.name for tool in self.tools or ()]
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise RequestError("tool_choice needs tools")
        if len(set(names)) < len(names):
            raise RequestError("tools has two functions of the same name")
        chosen = [] if self.tool_choice is None else self._chosen_names()
        if not set(chosen) <= set(names):
            raise RequestError("tool_choice names a function that is not among the tools")
        if self.modalities not in (None, ["text"]):
            raise RequestError('modalities must be ["text"]')

    def _check_final_message(self) -> None:
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: the answer "
                "has begun already"
            )
        last = self.messages[-1]
        if last.get("role") != "assistant" or last.get("tool_calls"):
            raise RequestError(
                "continue_final_message needs a last message of the assistant without tool_calls"
            )
        if self.grammar() is not None:
            raise RequestError(
                "continue_final_message has no meaning with response_format, structured_outputs "
                "or a forced call: the answer would match only from its middle on"
            )

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that may be called."""
        if self.tool_choice == "none":
            return []
        allowed = isinstance(self.tool_choice, AllowedToolChoice)
        names = frozenset(self._chosen_names() if allowed else ())
        return [
            tool.to_function() for tool in self.tools or () if not allowed or tool.name in names
        ]

    @property
    def custom_names(self) -> frozenset[str]:
        """Names of the custom tools."""
        return frozenset(tool.name for tool in self.tools or () if isinstance(tool, CustomTool))

    def _chosen_names(self) -> list[str]:
        """Names of the functions in tool_choice."""
        choice = self.tool_choice
        if isinstance(choice, (NamedToolChoice, CustomToolChoice)):
            return [choice.name]
        if isinstance(choice, AllowedToolChoice):
            return [tool.name for tool in choice.allowed_tools.tools]
        return []

    @property
    def forces_call(self) -> bool:
        """Whether the output must be a tool call."""
        if isinstance(self.tool_choice, AllowedToolChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return bool(self.tools) and self.tool_choice not in (None, "none", "auto")

    def grammar(self) -> Grammar | None:
        """Return the constraint on the output: of a forced call, or as requested.

        Raises:
            RequestError: the fields contradict each other.
        """
        grammar = super().grammar()
        if not self.forces_call:
            return grammar
        if grammar is not None and self.response_format is None:
            raise RequestError(
                f"{super()._grammar_field} has no meaning where a call is forced; give one of them"
            )
        if grammar is not None:
            self._warnings[:] = ["response_format: it has no effect where a call is forced"]
        named = isinstance(self.tool_choice, (NamedToolChoice, CustomToolChoice))
        name = self._chosen_names()[0] if named else None
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
            max_tokens=self._max_tokens(limit, None),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )


class TemplateRequest(StrictModel):
    """POST /apply-template: the prompt of a conversation as text."""

    model: str | None = Field(None, max_length=1024)
    messages: ChatMessages | None = None
    add_generation_prompt: bool | None = None
    tools: Annotated[list[Tool], FAIL_FAST] | None = Field(None, max_length=128)

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the template writes."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]


class TokenizeRequest(TemplateRequest):
    """POST /tokenize: a prompt, or messages through the chat template.

    content, add_special, parse_special and with_pieces are llama.cpp's names.
    """

    prompt: str | None = None
    content: str | None = Field(None, description="as prompt, without BOS unless add_special")
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = Field(
        None, description="control tokens in the text become their ids"
    )
    return_token_strs: bool | None = None
    with_pieces: bool | None = Field(None, description="tokens as objects with id and piece")

    @property
    def text(self) -> str | None:
        """The text to tokenize."""
        return self.prompt if self.content is None else self.content

    @property
    def adds_special_tokens(self) -> bool:
        """Whether BOS comes first: by default for a prompt, not for llama.cpp's content."""
        choice = self.add_special_tokens if self.add_special is None else self.add_special
        return self.content is None if choice is None else choice


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
            raise RequestError(f"logit_bias takes token ids as keys, not {key[:40]!r}")
        out[int(key)] = value
    return out
