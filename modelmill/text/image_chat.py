"""MiniGPT-4's conversations (Vicuna's turns between ``###``) and BLIP-2's questions.

MiniGPT-4's pictures are where the prompt has ``<ImageHere>``, BLIP-2's are at the front. The prompt
is split at the pictures and each piece is tokenized separately, with BOS only before the first; a
picture takes as many positions as it has embeddings. Facts: Vision-CAIR/MiniGPT-4,
conversation/conversation.py, first release and later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

from modelmill.core.errors import RequestError, TemplateError
from modelmill.text.chat_format import TemplatelessChatFormat
from modelmill.text.chat_format_registry import NO_TOOLS_CHAT_FORMAT
from modelmill.text.message_validation import (
    ChatRenderArgs,
    Messages,
    validate_and_normalize_messages,
)
from modelmill.text.tokenizer_base import Tokenizer
from modelmill.text.tokenizer_files import parse_json_file

IMAGE_CHAT_FILE = "image_chat.json"
DEFAULT_SYSTEM_PROMPT = (
    "Give the following image: <Img>ImageContent</Img>. You will be able to see the image once I "
    "provide it to you. "
    "Please answer my questions."
)
TURN_END = "###"
IMAGE_OPEN, IMAGE_CLOSE, IMAGE_PLACEHOLDER = "<Img>", "</Img>", "<ImageHere>"
# what stands at the end for the model to go on: the first release, and upstream's later one with a
# space more
GENERATION_PROMPT_BY_STYLE = {"first": "Assistant:", "current": "Assistant: "}
MAX_IMAGES = 32
MINIGPT4_FORMAT_NAME, BLIP2_FORMAT_NAME = "minigpt4", "blip-2"


@dataclass(frozen=True)
class ImagePart:
    """A picture in a conversation.

    Attributes:
        source: what the caller passed.
        is_url: whether it is a URL.
        location: for error messages.
    """

    source: Any
    location: str
    is_url: bool = False


class ImageChatMessage(NamedTuple):
    """A message; text: its text parts joined; parts: texts and pictures in order."""

    role: str
    text: str
    parts: Sequence[str | ImagePart]


class ImageChatFormat(TemplatelessChatFormat):
    """MiniGPT-4's chat format: Vicuna's turns with pictures between marks."""

    format_name = NO_TOOLS_CHAT_FORMAT
    # ### has two tokenizations, so it is matched as text
    stop_strings = (TURN_END,)
    penalize_prompt = False  # as upstream

    def __init__(
        self, tokenizer: Tokenizer, image_tokens: int, prompt_style: str = "first"
    ) -> None:
        """Make the format.

        Args:
            tokenizer: the language model's tokenizer.
            image_tokens: prompt positions per picture.
            prompt_style: "first" or "current".
        """
        self._tokenizer = tokenizer
        self.image_tokens, self._answer_prefix = (
            image_tokens,
            GENERATION_PROMPT_BY_STYLE[prompt_style],
        )
        self.stop_ids = tuple(tokenizer.eos_ids)

    def encode_with_images(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        **template: Unpack[ChatRenderArgs],
    ) -> tuple[list[int], list[tuple[int, ImagePart]]]:
        """Return the prompt ids, and the pictures with the position of each one's first id.

        A message's content may have {"type": "image_url", "image_url": {"url": …}} and {"type":
        "image", "image": …}.

        Raises:
            RequestError: for invalid messages, tools, or more than MAX_IMAGES pictures.
        """
        ids: list[int] = []
        pictures: list[tuple[int, ImagePart]] = []
        has_text = False
        for piece in self._render_texts_and_images(messages, add_generation_prompt, **template):
            if isinstance(piece, ImagePart):
                pictures.append((len(ids), piece))
                ids += [0] * self.image_tokens
            else:
                ids += self._tokenizer.encode(piece, bos=not has_text)
                has_text = True
        if len(pictures) > MAX_IMAGES:
            raise RequestError(
                f"{len(pictures)} pictures are more than the {MAX_IMAGES} that a conversation may "
                "have"
            )
        return ids, pictures

    def encode(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        **template: Unpack[ChatRenderArgs],
    ) -> list[int]:
        """See ``ChatFormat.encode``; the ids of a picture are 0."""
        return self.encode_with_images(messages, add_generation_prompt, **template)[0]

    def render(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        **template: Unpack[ChatRenderArgs],
    ) -> str:
        """See ``ChatFormat.render``; a picture is ``<ImageHere>``."""
        pieces = self._render_texts_and_images(messages, add_generation_prompt, **template)
        return "".join(
            IMAGE_PLACEHOLDER if isinstance(piece, ImagePart) else piece for piece in pieces
        )

    def _render_texts_and_images(
        self,
        messages: Messages,
        add_generation_prompt: bool,
        **template: Unpack[ChatRenderArgs],
    ) -> list[str | ImagePart]:
        """Return texts and pictures in order; raises RequestError as ``encode_with_images``."""
        if template.get("tools"):
            raise RequestError("this model's conversations have no tools")
        options = template.get("options")
        if options:
            raise RequestError(
                f"the template option {sorted(options)[0][:40]!r} is unknown: this model's "
                "conversations have no option; leave it out"
            )
        return _merge_adjacent_texts(
            self._format_texts_and_images(_parse_image_messages(messages), add_generation_prompt)
        )

    def _format_texts_and_images(
        self, messages: Sequence[ImageChatMessage], add_generation_prompt: bool
    ) -> list[str | ImagePart]:
        """Format a conversation as pieces of text and pictures."""
        system, pieces = DEFAULT_SYSTEM_PROMPT, list[str | ImagePart]()
        for role, text, parts in messages:
            if role == "system":
                system = text
            else:
                pieces += [
                    "Human: " if role == "user" else "Assistant: ",
                    *_format_turn(parts, role == "assistant"),
                    TURN_END,
                ]
        return [
            system + TURN_END,
            *pieces,
            *([self._answer_prefix] if add_generation_prompt else []),
        ]


class Blip2ChatFormat(ImageChatFormat):
    """BLIP-2's format: a picture, then "Question: … Answer:" (Li et al. 2023, §4).

    All pictures come first, then BOS and the turns; for a picture without text the model writes a
    caption.
    """

    penalize_prompt = True
    stop_strings = ("\n",)

    def _format_texts_and_images(
        self, messages: Sequence[ImageChatMessage], add_generation_prompt: bool
    ) -> list[str | ImagePart]:
        pictures: list[str | ImagePart] = [
            part for message in messages for part in message.parts if isinstance(part, ImagePart)
        ]
        turns: list[str] = []
        for role, text, _ in messages:
            text = text.strip()
            if role == "user" and text:
                turns.append(f"Question: {text}")
            elif role == "assistant":
                turns.append(f"Answer: {text.removesuffix('.')}.")
            elif text:
                turns.append(text)
        if add_generation_prompt and turns and turns[-1].startswith("Question: "):
            turns.append("Answer:")
        return [*pictures, " ".join(turns)]


def load_image_chat_format(files: Mapping[str, bytes], tokenizer: Tokenizer) -> ImageChatFormat:
    """Load the chat format from image_chat.json beside the tokenizer's files.

    Raises:
        TemplateError: if the format is unknown.
    """
    settings = parse_json_file(files, IMAGE_CHAT_FILE)
    tokens, prompt = settings.get("tokens"), settings.get("prompt")
    known = settings.get("format") == BLIP2_FORMAT_NAME or (
        settings.get("format") == MINIGPT4_FORMAT_NAME and prompt in GENERATION_PROMPT_BY_STYLE
    )
    if not known or type(tokens) is not int or not 0 < tokens < 65536:
        raise TemplateError(
            f"{IMAGE_CHAT_FILE} describes no known format of conversations with pictures; rebuild "
            "the engine"
        )
    return (
        Blip2ChatFormat(tokenizer, tokens)
        if settings["format"] == BLIP2_FORMAT_NAME
        else ImageChatFormat(tokenizer, tokens, prompt)
    )


def replace_prompt_style(files: Mapping[str, bytes], prompt_style: str) -> bytes:
    """Return image_chat.json with another prompt style.

    Raises:
        TemplateError: if the model has only one prompt style.
    """
    settings = parse_json_file(files, IMAGE_CHAT_FILE)
    if settings.get("format") != MINIGPT4_FORMAT_NAME:
        raise TemplateError(
            f"this model has one prompt style only; leave out the template {prompt_style!r}"
        )
    return json.dumps({**settings, "prompt": prompt_style}).encode()


def _parse_image_messages(messages: object) -> list[ImageChatMessage]:
    """Parse messages whose roles and parts these formats support.

    Raises:
        RequestError: for other roles or parts.
    """
    contents, plain = _parts_and_text_only_messages(messages)
    settings = []
    for index, (message, parts) in enumerate(
        zip(validate_and_normalize_messages(plain), contents, strict=True)
    ):
        role = message["role"]
        if role not in ("user", "assistant", "system") or message.get("tool_calls"):
            raise RequestError(
                f"messages[{index}]: the roles of this model are system, user and assistant"
            )
        if role == "system" and index:
            raise RequestError(f"messages[{index}]: the system message must come first")
        picture = next((part for part in parts if isinstance(part, ImagePart)), None)
        if role != "user" and picture is not None:
            raise RequestError(f"{picture.location}: only user messages may have pictures")
        settings.append(ImageChatMessage(role, message["content"], parts))
    return settings


def _parts_and_text_only_messages(messages: object) -> tuple[list[list[str | ImagePart]], Any]:
    """Return (each message's parts, the messages with only their text, for the usual checks)."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return [], messages  # refused by ``validate_and_normalize_messages``
    contents: list[list[str | ImagePart]] = []
    plain: list[Any] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            contents.append([content] if isinstance(content, str) else [])
            plain.append(message)
            continue
        parts = [
            _parse_image_part(part, f"messages[{index}].content[{place}]")
            for place, part in enumerate(content)
        ]
        texts = [part for part, picture in zip(content, parts, strict=True) if picture is None]
        contents.append(
            [
                _text_of_text_part(part) if picture is None else picture
                for part, picture in zip(content, parts, strict=True)
            ]
        )
        plain.append({**message, "content": texts})
    return contents, plain


def _parse_image_part(part: Any, location: str) -> ImagePart | None:
    """Return the picture of an image part; None for other parts."""
    part_type = part.get("type") if isinstance(part, Mapping) else None
    if part_type == "image" and part.get("image") is not None and set(part) == {"type", "image"}:
        return ImagePart(part["image"], location)
    if part_type == "image_url":
        image_url = part.get("image_url")
        url = image_url.get("url") if isinstance(image_url, Mapping) else image_url
        if not isinstance(url, str):
            raise RequestError(
                f'{location}: image_url must be {{"url": "data:image/png;base64,…"}}'
            )
        return ImagePart(url, location, is_url=True)
    return None


def _text_of_text_part(part: Any) -> str:
    """Return a text part's text; ``validate_and_normalize_messages`` refuses other parts later."""
    text = part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else ""


def _format_turn(content: Sequence[str | ImagePart], answer: bool) -> list[str | ImagePart]:
    """Return a turn's pieces: pictures between their marks, spaces around them, texts on lines."""
    out: list[str | ImagePart] = []
    before: str | ImagePart | None = None
    for part in content:
        if before is not None:
            out.append("\n" if isinstance(part, str) and isinstance(before, str) else " ")
        # upstream strips an answer before it becomes history
        out += (
            [IMAGE_OPEN, part, IMAGE_CLOSE]
            if isinstance(part, ImagePart)
            else [part.strip() if answer else part]
        )
        before = part
    return out


def _merge_adjacent_texts(pieces: Sequence[str | ImagePart]) -> list[str | ImagePart]:
    out: list[str | ImagePart] = []
    for piece in pieces:
        if isinstance(piece, str) and out and isinstance(out[-1], str):
            out[-1] += piece
        else:
            out.append(piece)
    return out
