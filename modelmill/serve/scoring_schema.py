"""Bodies of POST /v1/rerank and /v1/score."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from modelmill.core.errors import RequestError
from modelmill.core.types import MAX_INT32
from modelmill.serve.compatibility_fields import PoolingCompatibilityFields
from modelmill.serve.embeddings_schema import TruncatedTokens
from modelmill.serve.engine_request_fields import EngineRequestFields
from modelmill.serve.prompt_fields import TextList
from modelmill.serve.strict_models import FAIL_FAST, JsonObject, ModelName, Text

MAX_TEXTS = 2048
Documents = Annotated[list[Text | JsonObject], FAIL_FAST, Field(min_length=1, max_length=MAX_TEXTS)]


class RerankRequest(EngineRequestFields, PoolingCompatibilityFields):
    """Request body of POST /v1/rerank."""

    may_omit_model: ClassVar[bool] = True

    model: ModelName = ""
    query: Text = Field(min_length=1)
    documents: Documents | None = None
    texts: Documents | None = Field(None, description="the documents as TEI names them")
    top_n: int | None = Field(None, ge=0, le=MAX_TEXTS)
    return_text: bool | None = Field(None, description="with texts")
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = Field(
        None, ge=0, le=MAX_INT32, description="each document is cut to so many tokens; 0: none is"
    )
    user: str | None = Field(None, max_length=4096)
    truncate_prompt_tokens: TruncatedTokens | None = None

    def document_texts(self) -> list[str]:
        """The documents as texts.

        Raises:
            RequestError: a document has no text, or there is not exactly one list of them.
        """
        if (self.documents is None) == (self.texts is None):
            raise RequestError("documents: field required, or texts in its place")
        name, documents = "documents", self.documents or []
        if self.texts is not None:
            name, documents = "texts", self.texts
        texts = [each if isinstance(each, str) else each.get("text") for each in documents]
        for index, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                raise RequestError(f"{name}[{index}] must be a text, or an object with a text")
        return [str(text) for text in texts]

    def text_field_path(self, index: int) -> str:
        """The field of the query (0), or of a document."""
        name = "documents" if self.texts is None else "texts"
        return f"{name}[{index - 1}]" if index else "query"


class ScoreRequest(EngineRequestFields, PoolingCompatibilityFields):
    """Request body of POST /v1/score."""

    may_omit_model: ClassVar[bool] = True

    model: ModelName = ""
    text_1: Text | TextList | None = Field(None, max_length=1 << 22)
    text_2: Text | TextList | None = Field(None, max_length=1 << 22)
    queries: Text | TextList | None = Field(None, max_length=1 << 22)
    documents: Text | TextList | None = Field(None, max_length=1 << 22)
    user: str | None = Field(None, max_length=4096)
    truncate_prompt_tokens: TruncatedTokens | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of texts: one with each, or as many with as many.

        Raises:
            RequestError: a side is missing, or their lengths do not fit.
        """
        first = _as_list(self.text_1 if self.queries is None else self.queries)
        second = _as_list(self.text_2 if self.documents is None else self.documents)
        if not first or not second or not all((*first, *second)):
            raise RequestError("text_1 and text_2 must have at least one text each, none empty")
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}; give one, or as many"
            )
        return list(zip(first, second, strict=True))

    def text_field_path(self, text: str) -> str:
        """The first field that has this text."""
        for name in ("queries", "text_1", "documents", "text_2"):
            value = getattr(self, name)
            if value == text:
                return name
            if isinstance(value, list) and text in value:
                return f"{name}[{value.index(text)}]"
        raise AssertionError("the text is of a pair")


def _as_list(texts: str | list[str] | None) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts or ())
