"""Served engines as Ollama describes models, and the response models of its paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field

from modelmill.artifact.manifest import MANIFEST_FILE, Manifest
from modelmill.core.errors import ModelmillError
from modelmill.serve.dialects.ollama_answer import format_timestamp
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.response_model import ResponseModel


class OllamaMessageResponse(ResponseModel):
    """The message of an answer."""

    role: str
    content: str
    thinking: str = ""
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)


class OllamaAnswerResponse(ResponseModel):
    """What the last object of every answer has; times in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    logprobs: list[dict[str, Any]] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)


class OllamaChatResponse(OllamaAnswerResponse):
    """Response body of POST /api/chat."""

    message: OllamaMessageResponse


class OllamaGenerateResponse(OllamaAnswerResponse):
    """Response body of POST /api/generate."""

    response: str
    thinking: str = ""


class OllamaModelDetails(ResponseModel):
    """What kind of model it is; empty where the engine does not say."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModelEntry(ResponseModel):
    """A served engine."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaModelDetails


class OllamaRunningModel(ResponseModel):
    """A loaded engine. expires_at is far in the future for one that stays loaded."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaTagsResponse(ResponseModel):
    """Response body of GET /api/tags."""

    models: list[OllamaModelEntry]


class OllamaPsResponse(ResponseModel):
    """Response body of GET /api/ps."""

    models: list[OllamaRunningModel]


class OllamaVersionResponse(ResponseModel):
    """Response body of GET /api/version."""

    version: str
    modelmill: str


class OllamaShowResponse(ResponseModel):
    """Response body of POST /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaEmbedResponse(ResponseModel):
    """Response body of POST /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsResponse(ResponseModel):
    """Response body of POST /api/embeddings."""

    embedding: list[float]


class OllamaErrorResponse(BaseModel):
    """Body of every error of these paths."""

    error: str


OLLAMA_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": OllamaErrorResponse}
    for status in (400, 401, 403, 404, 405, 408, 413, 429, 500, 503)
}
"""Errors in the OpenAPI document, in place of those of the other paths."""
NEVER_EXPIRES_SECONDS = 253_370_764_800
"""The year 9999, as Ollama writes the expiry of a model that stays loaded."""


def language_manifest(engine: EngineClient) -> Manifest | None:
    """The manifest of an engine that generates text; None until it is known."""
    try:
        return engine.text_processor.manifest
    except ModelmillError:
        return engine.manifest


def model_entry(name: str, engine: EngineClient) -> dict[str, Any]:
    """Describe an engine for /api/tags."""
    return {
        "name": name,
        "model": name,
        "modified_at": format_timestamp(_modified_unix_seconds(engine)),
        **_size_digest_and_details(engine),
    }


def running_entry(name: str, engine: EngineClient, expires_at: float) -> dict[str, Any]:
    """Describe a loaded engine for /api/ps; ``expires_at`` in seconds since 1970."""
    info = engine.engine_info
    on_gpu = info is not None and info.device.startswith("cuda")
    identity = _size_digest_and_details(engine)
    return {
        "name": name,
        "model": name,
        **identity,
        "expires_at": format_timestamp(expires_at),
        "size_vram": identity["size"] if on_gpu else 0,
        "context_length": 0 if info is None else info.max_model_len,
    }


def show_model(engine: EngineClient) -> dict[str, Any]:
    """Describe an engine for /api/show.

    Raises:
        EngineNotReady: it is not open yet.
        RequestError: it does not generate text.
    """
    processor = engine.text_processor
    manifest = processor.manifest
    values = processor.generation_defaults.to_dict()["values"]
    family = manifest.model_type
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": engine.name,
        f"{family}.context_length": engine.max_model_len,
    }
    for key, name in (
        ("hidden_size", "embedding_length"),
        ("num_hidden_layers", "block_count"),
        ("num_attention_heads", "attention.head_count"),
        ("num_key_value_heads", "attention.head_count_kv"),
        ("vocab_size", "vocab_size"),
    ):
        if isinstance(manifest.config.get(key), int):
            info[f"{family}.{name}"] = manifest.config[key]
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in values.items()),
        "template": processor.chat_template_text,
        "details": model_details(manifest),
        "model_info": info,
        "capabilities": capabilities(engine),
        "modified_at": format_timestamp(_modified_unix_seconds(engine)),
    }


def capabilities(engine: EngineClient) -> list[str]:
    """What the engine can do, in Ollama's words."""
    processor = engine.text_processor
    chat_format = processor.chat_format
    chat = [] if chat_format is None else ["tools"]
    if chat_format is not None and (
        chat_format.thinking is not None or chat_format.reads_reasoning_effort
    ):
        chat.append("thinking")
    return ["completion", *chat, *(["vision"] if processor.supports_images else []), "embedding"]


def model_details(manifest: Manifest | None) -> dict[str, Any]:
    """Family and quantization of an engine."""
    family = "" if manifest is None else manifest.model_type
    build = {} if manifest is None else manifest.build
    recipe = build.get("quantization")
    level = build.get("dtype") if recipe in (None, "none") else recipe
    return {
        "parent_model": "",
        "format": "modelmill",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": str(level or ""),
    }


def _size_digest_and_details(engine: EngineClient) -> dict[str, Any]:
    manifest = language_manifest(engine)
    files: Sequence[dict[str, Any]] = () if manifest is None else [*manifest.files.values()]
    return {
        "size": sum(int(each.get("bytes", 0)) for each in files),
        "digest": "" if manifest is None else manifest.digest(),
        "details": model_details(manifest),
    }


def _modified_unix_seconds(engine: EngineClient) -> float:
    """When the engine was built; of an engine that is not open, when it was first served."""
    try:
        return (engine.path / MANIFEST_FILE).stat().st_mtime
    except OSError:
        pass
    return float(engine.created_at)
