"""Content blocks of Anthropic messages and their conversion to chat messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from modelmill.core.errors import RequestError
from modelmill.serve.compatibility_fields import ignored_field
from modelmill.serve.discriminated_unions import parse_by_type_field, parse_object
from modelmill.serve.encrypted_content_codec import PACKED_TEXT_PREFIX, TextDecompressor
from modelmill.serve.strict_models import (
    FAIL_FAST,
    IgnoredList,
    JsonObject,
    JsonObjectList,
    StrictModel,
    UnknownNullTolerantModel,
)
from modelmill.text.answer_pieces import (
    CALL_ID_PREFIX,
    SHORT_ID_CHARS,
    make_openai_tool_call,
)

BILLING_LINE_PREFIX = "x-anthropic-billing-header:"
_BILLING_LINES = re.compile(rf"\A(?:{BILLING_LINE_PREFIX}[^\n]*(?:\n+|\Z))+")
LongText = Annotated[str, Field(max_length=10 << 20)]
BlockText = LongText | JsonObjectList


TOOL_USE_PREFIX = "toolu_"


def to_tool_use_id(id: str) -> str:
    """The id of a call as Anthropic's API has it."""
    return TOOL_USE_PREFIX + id.removeprefix(CALL_ID_PREFIX)


def to_call_id(id: str) -> str:
    """The id of a call as it was made here: the prompt of the next turn is the same then.

    Ids of other servers keep their difference, and no more is known of them.
    """
    if not id.startswith(TOOL_USE_PREFIX):
        return id
    rest = id.removeprefix(TOOL_USE_PREFIX)
    return rest if len(rest) == SHORT_ID_CHARS else CALL_ID_PREFIX + rest


class ContentBlock(UnknownNullTolerantModel):
    """cache_control is accepted and ignored: every prefix is cached without marks."""

    cache_control: JsonObject | None = None


class TextBlock(ContentBlock):
    """A text."""

    type: Literal["text"]
    text: LongText
    citations: IgnoredList | None = None


class ImageSource(StrictModel):
    """The data of an image."""

    type: Literal["base64", "url"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None
    data: str | None = None
    url: str | None = None


class ImageTransformations(StrictModel):
    """What becomes of an image that is too large: the model's preprocessing makes it smaller."""

    oversized_image: Literal["downsize"] | None = None


class ImageBlock(ContentBlock):
    """An image."""

    type: Literal["image"]
    source: ImageSource
    transformations: ImageTransformations | None = None


class DocumentSource(StrictModel):
    """The text of a document."""

    type: Literal["text", "content"]
    media_type: Literal["text/plain"] | None = None
    data: LongText | None = None
    content: BlockText | None = None


class DocumentBlock(ContentBlock):
    """A document: its title, context and text, a line each."""

    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: JsonObject | None = None


class SearchResultBlock(ContentBlock):
    """A result of the client's own search: its title, source and texts, a line each."""

    type: Literal["search_result"]
    source: LongText
    title: LongText
    content: Annotated[list[TextBlock], FAIL_FAST]
    citations: JsonObject | None = None


class ToolReferenceBlock(ContentBlock):
    """A tool that a search of tools found; the model reads every tool anyhow."""

    type: Literal["tool_reference"]
    tool_name: str = Field(min_length=1, max_length=128)


class ToolUseBlock(ContentBlock):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=128)
    input: JsonObject
    caller: JsonObject | None = ignored_field("there is one caller")
    toolset_name: str | None = ignored_field("tools have names alone")


class ToolResultBlock(ContentBlock):
    """The result of a call. is_error has no counterpart in chat templates."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: BlockText | None = None
    is_error: bool | None = None
    toolset_name: str | None = ignored_field("tools have names alone")


class ThinkingBlock(UnknownNullTolerantModel):
    """What the model thought; its text is in the signature if the request had it omitted."""

    type: Literal["thinking"]
    thinking: LongText
    signature: LongText | None = None

    def read_text(self, unpacker: TextDecompressor, path: str) -> str:
        """The text; nothing of another server's signature is read.

        Args:
            unpacker: of the request.
            path: of the block, for errors.

        Raises:
            RequestError: the signature is damaged, or the request's are too large.
        """
        if self.thinking or not (self.signature or "").startswith(PACKED_TEXT_PREFIX):
            return self.thinking
        try:
            return unpacker.decompress(self.signature or "")
        except RequestError as error:
            message = str(error).replace("encrypted_content", f"{path}.signature")
            raise RequestError(message) from None


class RedactedThinkingBlock(StrictModel):
    """Encrypted thinking of another model: accepted and ignored."""

    type: Literal["redacted_thinking"]
    data: str


class MessageParam(StrictModel):
    """A message in a request."""

    role: Literal["user", "assistant", "system"]
    content: LongText | JsonObjectList


_TEXT_TYPES: dict[str, type[StrictModel]] = {"text": TextBlock}
_INPUT_TYPES: dict[str, type[StrictModel]] = {
    "text": TextBlock,
    "image": ImageBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
}
_RESULT_TYPES: dict[str, type[StrictModel]] = {
    **_INPUT_TYPES,
    "tool_reference": ToolReferenceBlock,
}
_BLOCK_MODELS_BY_ROLE: dict[str, dict[str, type[StrictModel]]] = {
    "system": _TEXT_TYPES,
    "user": {**_INPUT_TYPES, "tool_result": ToolResultBlock},
    "assistant": {
        "text": TextBlock,
        "tool_use": ToolUseBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
    },
}


def to_chat_messages(
    system: str | Sequence[Any] | None, messages: Sequence[Any]
) -> list[dict[str, Any]]:
    """Convert a conversation to chat messages.

    Billing headers at the start of system texts are dropped: they change with every request and
    would keep the prefix cache from finding the rest. Successive messages of a role are one turn.

    Raises:
        RequestError: a message or block is invalid; the message names it.
    """
    chat: list[dict[str, Any]] = []
    if system is not None:
        texts = [text for text in _system_texts(system) if text]
        if texts:
            chat.append(
                {"role": "system", "content": _simplify_parts([_text_part(text) for text in texts])}
            )
    unpacker = TextDecompressor()
    for index, raw in enumerate(messages):
        path = f"messages[{index}]"
        message = parse_object(raw, path, MessageParam)
        blocks = _parse_blocks(
            message.content, f"{path}.content", _BLOCK_MODELS_BY_ROLE[message.role]
        )
        if message.role == "assistant":
            _append_assistant_message(chat, blocks, f"{path}.content", unpacker)
        else:
            _append_user_and_tool_messages(chat, message.role, blocks, f"{path}.content")
    if not any(message["role"] != "system" for message in chat):
        raise RequestError(
            "messages has no text, image, call or result of the user or the assistant; give at "
            "least one"
        )
    return chat


def iter_image_field_paths(messages: Sequence[Any]) -> Iterator[str]:
    """Yield the fields of the pictures of a valid conversation, in order."""
    for index, message in enumerate(messages):
        yield from _iter_block_image_fields(message["content"], f"messages[{index}].content")


def _iter_block_image_fields(content: Any, path: str) -> Iterator[str]:
    for index, block in enumerate(content if isinstance(content, list) else ()):
        where = f"{path}[{index}]"
        if block["type"] == "image":
            yield where
        elif block["type"] == "tool_result":
            yield from _iter_block_image_fields(block.get("content"), f"{where}.content")
        elif block["type"] == "document":
            texts = block["source"].get("content")
            yield from _iter_block_image_fields(texts, f"{where}.source.content")


def strip_billing_headers(text: str) -> str:
    """Remove lines of Claude Code's billing header from the start of a system text."""
    return _BILLING_LINES.sub("", text) if text.startswith(BILLING_LINE_PREFIX) else text


def _system_texts(system: str | Sequence[Any]) -> list[str]:
    blocks = _parse_blocks(system, "system", _TEXT_TYPES)
    return [strip_billing_headers(block.text) for block in blocks if isinstance(block, TextBlock)]


def _parse_blocks(
    content: str | Sequence[Any], path: str, models: dict[str, type[StrictModel]]
) -> list[StrictModel]:
    """Validate blocks, each as the model of its type; a string is one block of text."""
    if isinstance(content, str):
        return [parse_object({"type": "text", "text": content}, path, TextBlock)]
    return [
        parse_by_type_field(raw, f"{path}[{index}]", models, "content blocks")
        for index, raw in enumerate(content)
    ]


def _append_assistant_message(
    chat: list[dict[str, Any]],
    blocks: Sequence[StrictModel],
    path: str,
    unpacker: TextDecompressor,
) -> None:
    if not chat or chat[-1]["role"] != "assistant":
        chat.append({"role": "assistant", "content": None})
    message = chat[-1]
    parts = _content_to_parts(message["content"])
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            parts.append(_text_part(block.text))
        elif isinstance(block, ThinkingBlock):
            thought = message.get("reasoning_content")
            text = block.read_text(unpacker, f"{path}[{index}]")
            message["reasoning_content"] = text if thought is None else f"{thought}\n{text}"
        elif isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            message.setdefault("tool_calls", []).append(
                make_openai_tool_call(to_call_id(block.id), block.name, arguments)
            )
    if parts or not message.get("tool_calls"):
        message["content"] = _simplify_parts(parts) if parts else ""


def _append_user_and_tool_messages(
    chat: list[dict[str, Any]], role: str, blocks: Sequence[StrictModel], path: str
) -> None:
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            _append_or_merge_parts(chat, role, parts)
            parts = []
            where = f"{path}[{index}].content"
            content = _parse_blocks(block.content or "", where, _RESULT_TYPES)
            result = [
                part
                for number, each in enumerate(content)
                for part in _block_to_parts(each, f"{where}[{number}]")
            ]
            chat.append(
                {
                    "role": "tool",
                    "tool_call_id": to_call_id(block.tool_use_id),
                    "content": _simplify_parts(result),
                }
            )
        else:
            parts += _block_to_parts(block, f"{path}[{index}]")
    _append_or_merge_parts(chat, role, parts)


def _append_or_merge_parts(
    chat: list[dict[str, Any]], role: str, parts: list[dict[str, Any]]
) -> None:
    if not parts:
        return
    if chat and chat[-1]["role"] == role == "user":
        chat[-1]["content"] = _simplify_parts([*_content_to_parts(chat[-1]["content"]), *parts])
    else:
        chat.append({"role": role, "content": _simplify_parts(parts)})


def _block_to_parts(block: StrictModel, path: str) -> list[dict[str, Any]]:
    if isinstance(block, TextBlock):
        return [_text_part(block.text)]
    if isinstance(block, DocumentBlock):
        return _document_parts(block, f"{path}.source")
    if isinstance(block, SearchResultBlock):
        texts = (block.title, block.source, *(each.text for each in block.content))
        return [_text_part(text) for text in texts if text]
    if isinstance(block, ToolReferenceBlock):
        return [_text_part(block.tool_name)]
    assert isinstance(block, ImageBlock), "the other types are handled above"
    source = block.source
    if source.type == "url":
        if source.url is None:
            raise RequestError(f"{path}: an image source of type url needs its url")
        return [{"type": "image_url", "image_url": {"url": source.url}}]
    if source.media_type is None or source.data is None:
        raise RequestError(f"{path}: an image source of type base64 needs its media_type and data")
    url = f"data:{source.media_type};base64,{source.data}"
    return [{"type": "image_url", "image_url": {"url": url}}]


def _document_parts(block: DocumentBlock, path: str) -> list[dict[str, Any]]:
    source = block.source
    if source.type == "text":
        if source.data is None:
            raise RequestError(f"{path}: a document source of type text needs its data")
        content = [_text_part(source.data)]
    else:
        blocks = _parse_blocks(source.content or "", f"{path}.content", _INPUT_TYPES)
        content = [
            part
            for index, each in enumerate(blocks)
            for part in _block_to_parts(each, f"{path}.content[{index}]")
        ]
    return [*(_text_part(text) for text in (block.title, block.context) if text), *content]


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _content_to_parts(content: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [_text_part(content)] if content else []
    return list(content or ())


def _simplify_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A single text stays a string, as clients of the chat API send it."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts
