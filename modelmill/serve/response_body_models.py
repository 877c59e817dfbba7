"""Response models of OpenAI's paths, and of those that are modelmill's own.

Responses themselves are made as plain dicts, which saves validation while tokens are generated. No
class allows keys that it does not name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel

from modelmill.serve.response_model import ResponseModel


class EngineStatus(ResponseModel):
    """State of one served engine."""

    name: str
    state: Literal[
        "unloaded", "loading", "ready", "sleeping", "unloading", "restarting", "failed", "stopped"
    ]
    restarts: int
    progress: dict[str, str | int | float] = Field(default_factory=dict)
    pinned: bool = True
    waiting: int = Field(0, description="requests that wait until it is loaded")
    expires_at: int | None = Field(None, description="seconds since 1970; null: it stays loaded")
    error: str = Field("", description="why it could not be loaded the last time")


class HealthResponse(ResponseModel):
    """Response body of GET /health."""

    status: Literal["ok", "loading", "unavailable", "draining"]
    engines: list[EngineStatus]


class VersionResponse(ResponseModel):
    """Response body of GET /version."""

    version: str


class ModelCard(ResponseModel):
    """OpenAI's model object of one served engine."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    state: Literal["unloaded", "loading", "loaded", "sleeping", "unloading", "failed"]
    progress: float = Field(description="of loading, from 0 to 1")
    pinned: bool = Field(description="not unloaded by time or memory")
    expires_at: int | None = Field(
        description="when it is unloaded if nothing uses it, in seconds since 1970"
    )
    kind: str = Field(description="as engine_type")
    engine_type: str
    input_modalities: list[str] = Field(default_factory=list)
    chat: bool | None = None
    default_sampling: dict[str, Any] | None = Field(
        None, description="sampling defaults of API requests"
    )
    suggested_sampling: dict[str, Any] | None = Field(
        None, description="sampling defaults of the web page"
    )


class ModelList(ResponseModel):
    """Response body of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenPiece(ResponseModel):
    """A token; the piece is its bytes where it is a part of a character."""

    id: int
    piece: str | list[int]


class TokenizeResponse(ResponseModel):
    """Response body of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPiece]
    token_strs: list[str] | None = None


class TemplateResponse(ResponseModel):
    """Response body of POST /apply-template."""

    prompt: str


class PropsResponse(ResponseModel):
    """Response body of GET /props."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str


class DetokenizeResponse(ResponseModel):
    """Response body of POST /detokenize."""

    prompt: str = Field(description="as vLLM has it")
    content: str = Field(description="the same text, as llama.cpp has it")


class PromptTokensDetails(ResponseModel):
    """Details of the prompt tokens."""

    cached_tokens: int


class CompletionTokensDetails(ResponseModel):
    """Details of the completion tokens."""

    reasoning_tokens: int = Field(description="of the thinking and the mark that ends it")


class Usage(ResponseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatUsage(Usage):
    """Token counts of a chat completion."""

    completion_tokens_details: CompletionTokensDetails


class TopLogprob(ResponseModel):
    """Log-probability of a token."""

    token: str
    logprob: Annotated[float, Field(le=0)]
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ChatTokenLogprob(TopLogprob):
    """Log-probability of a sampled token."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(ResponseModel):
    """Log-probabilities of a choice."""

    content: list[ChatTokenLogprob]
    refusal: None


class FunctionCall(ResponseModel):
    """name and arguments (JSON text)."""

    name: str
    arguments: str


class MessageToolCall(ResponseModel):
    """A tool call in an assistant message."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class CustomCall(ResponseModel):
    """name and input (a text)."""

    name: str
    input: str


class MessageCustomCall(ResponseModel):
    """A call of a custom tool in an assistant message."""

    id: str
    type: Literal["custom"]
    custom: CustomCall


class AssistantMessage(ResponseModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[MessageToolCall | MessageCustomCall] = Field(default_factory=list)


class ChatChoice(ResponseModel):
    """One of the answers to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class GeneratedResponse(ResponseModel):
    """What both responses with choices have."""

    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    timings: dict[str, Any] = Field(default_factory=dict, description="as llama.cpp's")
    warnings: list[str] = Field(
        default_factory=list, description="what of the request was not enforced"
    )


class ChatCompletionResponse(GeneratedResponse):
    """Response body of POST /v1/chat/completions."""

    id: str = Field(pattern="^chatcmpl-")
    object: Literal["chat.completion"]
    usage: ChatUsage
    choices: list[ChatChoice]
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(ResponseModel):
    """The older shape: lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """One of the ways a text goes on."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(GeneratedResponse):
    """Response body of POST /v1/completions."""

    id: str = Field(pattern="^cmpl-")
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class EmbeddingData(ResponseModel):
    """A vector, as numbers or as base64 of float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseModel):
    """Token counts of an embeddings request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(ResponseModel):
    """Response body of POST /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingUsage


class OutputText(ResponseModel):
    """A piece of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[ChatTokenLogprob]


class OutputMessage(ResponseModel):
    """A message of the model in a response's output."""

    type: Literal["message"]
    id: str = Field(pattern="^msg_")
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(ResponseModel):
    """What calls of functions and of custom tools have in common."""

    call_id: str
    name: str
    namespace: str = ""
    status: Literal["completed", "incomplete"]


class OutputFunctionCall(OutputCall):
    """A call of a function."""

    type: Literal["function_call"]
    id: str = Field(pattern="^fc_")
    arguments: str


class OutputCustomCall(OutputCall):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    id: str = Field(pattern="^ctc_")
    input: str


class OutputReasoningText(ResponseModel):
    """A piece of the thinking."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(ResponseModel):
    """The thinking before an answer."""

    type: Literal["reasoning"]
    id: str = Field(pattern="^rs_")
    summary: list[Any] = Field(max_length=0)
    content: list[OutputReasoningText]
    status: Literal["completed", "incomplete"]
    encrypted_content: str | None = Field(None, description="if include asks for it")


class InputTokensDetails(PromptTokensDetails):
    """cache_write_tokens is always 0: nothing is charged for."""

    cache_write_tokens: Literal[0]


class OutputTokensDetails(ResponseModel):
    """Details of the output tokens."""

    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(ResponseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponsesResponse(ResponseModel):
    """Response body of POST /v1/responses."""

    id: str = Field(pattern="^resp_")
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    incomplete_details: IncompleteDetails | None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: list[OutputMessage | OutputFunctionCall | OutputCustomCall | OutputReasoning] = Field(
        min_length=1
    )
    error: None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    truncation: Literal["disabled"]
    parallel_tool_calls: bool
    text: dict[str, Any]
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    temperature: float
    reasoning: dict[str, str | None]
    usage: ResponseUsage
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: Literal[False]
    service_tier: Literal["default"]
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None
    user: str | None
    warnings: list[str] = Field(default_factory=list)


class InputItemList(ResponseModel):
    """Response body of GET /v1/responses/{response_id}/input_items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CompactionResponse(ResponseModel):
    """Response body of POST /v1/responses/compact."""

    id: str = Field(pattern="^resp_")
    object: Literal["response.compaction"]
    created_at: int
    status: Literal["completed", "incomplete"] = Field(
        description="incomplete: the summary was cut at its limit"
    )
    incomplete_details: IncompleteDetails | None
    compacted: bool = Field(description="false: the output is the input, which was not longer")
    output: list[dict[str, Any]]
    usage: ResponseUsage
    warnings: list[str] = Field(default_factory=list)


class InputTokensResponse(ResponseModel):
    """Response body of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class RankedDocument(ResponseModel):
    """A document with its similarity to the query."""

    index: int
    relevance_score: float
    document: dict[str, str] = Field(default_factory=dict)


class RerankResponse(ResponseModel):
    """Response body of POST /v1/rerank."""

    id: str = Field(pattern="^rerank-")
    model: str
    method: Literal["embedding_cosine"]
    results: list[RankedDocument]
    usage: EmbeddingUsage


class ScoredText(ResponseModel):
    """A text of a request in TEI's form."""

    index: int
    score: float
    text: str = Field("", description="with return_text")


class RerankResponseOrScoredTexts(RootModel[RerankResponse | list[ScoredText]]):
    """Response body of POST /v1/rerank; of a request with ``texts`` in TEI's form."""


class PairScore(ResponseModel):
    """The similarity of a pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(ResponseModel):
    """Response body of POST /v1/score."""

    id: str = Field(pattern="^score-")
    object: Literal["list"]
    created: int
    model: str
    method: Literal["embedding_cosine"]
    data: list[PairScore]
    usage: EmbeddingUsage


class LlamaCppTokenLogprob(ResponseModel):
    """Log-probability of a token."""

    id: int
    token: str
    bytes: list[Annotated[int, Field(ge=0, le=255)]]
    logprob: Annotated[float, Field(le=0)]


class LlamaCppSampledTokenLogprobs(LlamaCppTokenLogprob):
    """Log-probability of a sampled token, and those of the most likely ones."""

    top_logprobs: list[LlamaCppTokenLogprob]


class LlamaCppCompletionResponse(ResponseModel):
    """Response body of POST /infill, and of POST /completion for one prompt."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    has_new_line: bool
    truncated: bool = Field(description="the context ended the answer")
    stop_type: Literal["eos", "limit", "word", "none"]
    stopping_word: str
    generation_settings: dict[str, Any]
    timings: dict[str, Any]
    completion_probabilities: list[LlamaCppSampledTokenLogprobs] = Field(
        default_factory=list, description="with n_probs"
    )
    warnings: list[str] = Field(default_factory=list)


class LlamaCppCompletionAnswer(
    RootModel[
        LlamaCppCompletionResponse
        | list[LlamaCppCompletionResponse | dict[str, Any]]
        | dict[str, Any]
    ]
):
    """Response body of POST /completion: of several prompts a list.

    With ``response_fields`` it is an object of the chosen fields by path.
    """


class LlamaCppInfillAnswer(RootModel[LlamaCppCompletionResponse | dict[str, Any]]):
    """Response body of POST /infill; with ``response_fields`` the chosen fields by path."""


class ErrorDetail(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Body of every error."""

    error: ErrorDetail


class LlamaCppErrorDetail(BaseModel):
    """Details of an error of llama.cpp's own paths."""

    code: int = Field(description="the status of the response")
    message: str
    type: str
    param: str | None
    n_prompt_tokens: int | None = Field(None, description="of a prompt that is too long")
    n_ctx: int | None = Field(None, description="tokens that such a prompt may have")


class LlamaCppErrorResponse(BaseModel):
    """Body of every error of these paths."""

    error: LlamaCppErrorDetail


LLAMA_CPP_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": LlamaCppErrorResponse}
    for status in (400, 401, 403, 404, 405, 408, 413, 429, 500, 503)
}
"""Errors in the OpenAPI document, in place of those of the other paths."""
