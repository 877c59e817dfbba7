"""``python -m tools.request_fields_page``: write docs/request-fields.md from the request models."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.compatibility_fields import AccountFields, list_compatibility_fields
from modelmill.serve.completion_schema import CompletionRequest
from modelmill.serve.dialects.anthropic_schema import AnthropicTool, MessagesRequest
from modelmill.serve.dialects.llama_cpp_schema import (
    InfillExtraFile,
    InfillRequest,
    LlamaCppCompletionRequest,
)
from modelmill.serve.dialects.ollama_options import IGNORED_OPTIONS, NEUTRAL_OPTIONS
from modelmill.serve.embeddings_schema import EmbeddingRequest
from modelmill.serve.generation_schema import GenerationFields
from modelmill.serve.message_cleaning import DROPPED_MESSAGE_KEYS
from modelmill.serve.query_parameters import IGNORED_QUERY_PARAMETERS
from modelmill.serve.response_tools import FlatCustomTool, FunctionTool, HostedTool
from modelmill.serve.responses_schema import CompactRequest, ResponsesRequest
from modelmill.serve.scoring_schema import RerankRequest, ScoreRequest
from modelmill.serve.strict_models import StrictModel
from modelmill.serve.tokenize_schema import TokenizeRequest
from tools import generated_page

PAGE = Path("docs/request-fields.md")
HEAD = """<!-- Made by `make request-fields` from modelmill/serve. -->

# Request fields that change nothing

Clients send fields of other servers. What can be served is served ([dialects](dialects.md)); what
would change the answer in silence is a 400 that names the field. The rest is accepted and has no
effect. An unknown field that is `null` is accepted by completions, chat completions, responses,
Anthropic Messages, embeddings, rerank, score and `/tokenize`.
"""
SECTION = """
## {title}

| {noun} | value | why it has no effect |
|---|---|---|
"""
HOSTED_TYPES = get_args(HostedTool.model_fields["type"].annotation)
HOSTED = """
Tools of these types are left out, with a warning in the response, since this server runs no tools:
{types}.
"""
QUERY = """
## Query parameters

Paths that take no body refuse unknown parameters, but for these:

| parameter | why it has no effect |
|---|---|
{rows}"""
MESSAGES = """
## Keys of messages

Messages of answers come back with keys that say nothing to a model. Dropped are {keys}.
`reasoning` is read as `reasoning_content`, and `function_call` is dropped if it is `null` alone.
`prefix` is dropped unless it is `true`, which is an error that names `continue_final_message`.
"""


def render() -> dict[Path, str]:
    """The page by its path below the repository."""
    shared = set(_model_rows([GenerationFields]))
    native = [
        row for row in _model_rows([LlamaCppCompletionRequest, InfillRequest]) if row not in shared
    ]
    options = [
        *((name, "any", reason) for name, reason in IGNORED_OPTIONS.items()),
        *(
            (name, " or ".join(map(str, off)), "changes nothing")
            for name, off in NEUTRAL_OPTIONS.items()
        ),
    ]
    keys = ", ".join(f"`{key}`" for key in sorted(DROPPED_MESSAGE_KEYS - {"prefix"}))
    queries = "".join(
        f"| `{name}` | {reason} |\n" for name, reason in IGNORED_QUERY_PARAMETERS.items()
    )
    text = "".join(
        (
            HEAD,
            SECTION.format(title="Completions and chat completions", noun="field"),
            _table(_model_rows([CompletionRequest, ChatRequest])),
            SECTION.format(title="/completion and /infill", noun="field"),
            _table(native),
            _table(
                (f"input_extra[].{name}", "any", reason)
                for name, _, reason in list_compatibility_fields([InfillExtraFile])
            ),
            SECTION.format(title="Responses", noun="field"),
            _table(
                row
                for row in _model_rows([ResponsesRequest])
                if row[0] not in AccountFields.model_fields
            ),
            _table(
                (f"tools[].{name}", "any", reason)
                for name, _, reason in list_compatibility_fields([FunctionTool, FlatCustomTool])
            ),
            HOSTED.format(types=", ".join(f"`{each}`" for each in HOSTED_TYPES)),
            SECTION.format(title="Embeddings, rerank and score", noun="field"),
            _table(_model_rows([EmbeddingRequest, RerankRequest, ScoreRequest])),
            SECTION.format(title="/tokenize and /apply-template", noun="field"),
            _table(_model_rows([TokenizeRequest])),
            SECTION.format(title="Compaction", noun="field"),
            _table(_model_rows([CompactRequest])),
            SECTION.format(title="Anthropic Messages", noun="field"),
            _table(_model_rows([MessagesRequest])),
            _table(
                (f"tools[].{name}", "any", reason)
                for name, _, reason in list_compatibility_fields([AnthropicTool])
            ),
            SECTION.format(title="Options of Ollama", noun="option"),
            _table(sorted(options)),
            QUERY.format(rows=queries),
            MESSAGES.format(keys=keys),
        )
    )
    return {PAGE: text}


def _model_rows(models: Sequence[type[StrictModel]]) -> Iterable[tuple[str, str, str]]:
    for name, kind, reason in list_compatibility_fields(models):
        is_ignored = kind == "ignored"
        yield name, "any" if is_ignored else reason, reason if is_ignored else "changes nothing"


def _table(rows: Iterable[tuple[str, str, str]]) -> str:
    return "".join(f"| `{name}` | {value} | {reason} |\n" for name, value, reason in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; with ``--check`` only say whether it is stale."""
    return generated_page.run_pages(argv, __doc__, "request-fields", lambda _: render())


if __name__ == "__main__":
    sys.exit(main())
