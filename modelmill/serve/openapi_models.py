"""The response model of each path: for the OpenAPI document, and to check responses in tests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from modelmill.serve.dialects.anthropic_models import CountTokensResponse, MessageResponse
from modelmill.serve.dialects.ollama_models import (
    OllamaChatResponse,
    OllamaEmbeddingsResponse,
    OllamaEmbedResponse,
    OllamaGenerateResponse,
    OllamaPsResponse,
    OllamaShowResponse,
    OllamaTagsResponse,
    OllamaVersionResponse,
)
from modelmill.serve.kv_session_schema import DeletedSession, SessionList, SessionResponse
from modelmill.serve.model_admin_schema import ModelStateResponse
from modelmill.serve.response_body_models import (
    ChatCompletionResponse,
    CompactionResponse,
    CompletionResponse,
    DetokenizeResponse,
    EmbeddingResponse,
    HealthResponse,
    InputItemList,
    InputTokensResponse,
    LlamaCppCompletionAnswer,
    LlamaCppInfillAnswer,
    ModelCard,
    ModelList,
    PropsResponse,
    RerankResponseOrScoredTexts,
    ResponsesResponse,
    ScoreResponse,
    TemplateResponse,
    TokenizeResponse,
    VersionResponse,
)

REF_TEMPLATE = "#/components/schemas/{model}"
RESPONSE_MODELS: dict[str, type[BaseModel]] = {
    "/health": HealthResponse,
    "/version": VersionResponse,
    "/v1/models": ModelList,
    "/v1/models/{name}": ModelCard,
    "/v1/models/load": ModelStateResponse,
    "/v1/models/unload": ModelStateResponse,
    "/v1/sessions": SessionList,
    "/v1/sessions/{name}": DeletedSession,
    "/v1/sessions/save": SessionResponse,
    "/v1/sessions/restore": SessionResponse,
    "/v1/models/pin": ModelStateResponse,
    "/v1/models/reload": ModelStateResponse,
    "/tokenize": TokenizeResponse,
    "/detokenize": DetokenizeResponse,
    "/apply-template": TemplateResponse,
    "/props": PropsResponse,
    "/v1/chat/completions": ChatCompletionResponse,
    "/v1/chat/completions/input_tokens": InputTokensResponse,
    "/v1/completions": CompletionResponse,
    "/v1/embeddings": EmbeddingResponse,
    "/v1/responses": ResponsesResponse,
    "/v1/responses/compact": CompactionResponse,
    "/v1/responses/input_tokens": InputTokensResponse,
    "/v1/responses/{response_id}/input_items": InputItemList,
    "/v1/rerank": RerankResponseOrScoredTexts,
    "/v1/score": ScoreResponse,
    "/completion": LlamaCppCompletionAnswer,
    "/infill": LlamaCppInfillAnswer,
    "/v1/messages": MessageResponse,
    "/v1/messages/count_tokens": CountTokensResponse,
    "/api/chat": OllamaChatResponse,
    "/api/generate": OllamaGenerateResponse,
    "/api/embed": OllamaEmbedResponse,
    "/api/embeddings": OllamaEmbeddingsResponse,
    "/api/show": OllamaShowResponse,
    "/api/tags": OllamaTagsResponse,
    "/api/ps": OllamaPsResponse,
    "/api/version": OllamaVersionResponse,
}
SSE_STREAM_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/completion",
    "/infill",
)
NDJSON_PATHS = ("/api/chat", "/api/generate")
"""Paths whose streams are lines of JSON."""
SSE_EVENT_SCHEMA = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
    "additionalProperties": False,
}
"""An event of a stream, before its data are parsed."""
_NAME_CLASH_PREFIX = "Answer"


def add_response_schemas(document: dict[str, Any]) -> None:
    """Add the response schemas to an OpenAPI document."""
    models = dict.fromkeys(RESPONSE_MODELS.values())
    schemas_by_model, shared = models_json_schema(
        [(model, "validation") for model in models], ref_template=REF_TEMPLATE
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    new_names = {
        name: f"{_NAME_CLASH_PREFIX}{name}" if name in schemas else name
        for name in shared.get("$defs", {})
    }
    for name, schema in shared.get("$defs", {}).items():
        schemas[new_names[name]] = _rename_refs(schema, new_names)
    for path, model in RESPONSE_MODELS.items():
        for operation in document["paths"].get(path, {}).values():
            content = {
                "application/json": {
                    "schema": _rename_refs(schemas_by_model[model, "validation"], new_names)
                }
            }
            if path in SSE_STREAM_PATHS:
                content["text/event-stream"] = {"schema": SSE_EVENT_SCHEMA}
            if path in NDJSON_PATHS:
                content["application/x-ndjson"] = {"schema": {"type": "object"}}
            operation["responses"]["200"]["content"] = content
    for operation in document["paths"].get("/metrics", {}).values():
        operation["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    for operation in document["paths"].get("/health", {}).values():
        # while engines load, /health has the same format
        error_content = operation["responses"]["503"]["content"]["application/json"]
        health_schema = _rename_refs(schemas_by_model[HealthResponse, "validation"], new_names)
        operation["responses"]["503"]["content"] = {
            "application/json": {"schema": {"anyOf": [health_schema, error_content["schema"]]}}
        }


def _rename_refs(schema: Any, new_names: dict[str, str]) -> Any:
    """The schema with references renamed by ``new_names``."""
    if isinstance(schema, list):
        return [_rename_refs(each, new_names) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: _rename_refs(value, new_names) for key, value in schema.items()}
    if isinstance(out.get("$ref"), str):
        name = out["$ref"].rpartition("/")[2]
        out["$ref"] = REF_TEMPLATE.format(model=new_names.get(name, name))
    return out
