"""MiniGPT-4's conversations: Vicuna's turns between ``###``, with pictures where the prompt says ``<ImageHere>``;
and BLIP-2's questions, with the pictures in front.

The prompt is cut at the pictures and every piece is tokenized by itself, BOS in front of the first alone; a picture
takes as many places as it has embeddings. Facts: Vision-CAIR/MiniGPT-4, conversation/conversation.py, first release
and later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from modelmill.core.errors import RequestError, TemplateError
from modelmill.text.files import read_json
from modelmill.text.messages import checked
from modelmill.text.tokens import Tokenizer
from modelmill.text.tools import TOLD

FILE = "image_chat.json"
SYSTEM = (
    "Give the following image: <Img>ImageContent</Img>. You will be able to see the image once I provide it to you. "
    "Please answer my questions."
)
END = "###"
OPEN, CLOSE, HERE = "<Img>", "</Img>", "<ImageHere>"
# what stands at the end for the model to go on: the first release, and upstream's later one with a space more
ASKS = {"first": "Assistant:", "current": "Assistant: "}
MOST_IMAGES = 32
MINIGPT4, BLIP2 = "minigpt4", "blip-2"


@dataclass(frozen=True)
class Picture:
    """A picture in a conversation. source: what the caller gave for it; url: it is a URL's text. where: for errors."""

    source: Any
    where: str
    url: bool = False


class Said(NamedTuple):
    """A message. text: its texts as one; parts: texts and pictures in the order given."""

    role: str
    text: str
    parts: Sequence[str | Picture]


class ImageChat:
    """tokens: places that a picture takes. prompt: "first" or "current"."""

    prompt_counts = False  # whether penalties of the original see the prompt's ids

    def __init__(self, tokenizer: Tokenizer, tokens: int, prompt: str = "first") -> None:
        self._tokenizer = tokenizer
        self.tokens, self._asks = tokens, ASKS[prompt]
        self.stop_ids: tuple[int, ...] = tuple(tokenizer.eos_ids)
        # two tokenizations give ###, and one of their parts is ## alone: the text decides
        self.stop_strings: tuple[str, ...] = (END,)
        self.tool_style = TOLD
        self.writes_calls = False

    def place(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], list[tuple[int, Picture]]]:
        """Prompt ids, and the pictures with the position at which each one's places begin.

        A message's content may hold {"type": "image_url", "image_url": {"url": …}} and {"type": "image", "image": …}.
        Raises RequestError for wrong messages, tools, or more than MOST_IMAGES pictures.
        """
        ids: list[int] = []
        pictures: list[tuple[int, Picture]] = []
        begun = False
        for piece in self._pieces(messages, add_generation_prompt, tools, options):
            if isinstance(piece, Picture):
                pictures.append((len(ids), piece))
                ids += [0] * self.tokens
            else:
                ids += self._tokenizer.encode(piece, bos=not begun)
                begun = True
        if len(pictures) > MOST_IMAGES:
            raise RequestError(f"{len(pictures)} pictures are more than the {MOST_IMAGES} that a conversation may hold")
        return ids, pictures

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """As ChatFormat.encode; a picture's places hold 0."""
        return self.place(messages, add_generation_prompt, tools=tools, options=options)[0]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """As ChatFormat.render; a picture is ``<ImageHere>``."""
        pieces = self._pieces(messages, add_generation_prompt, tools, options)
        return "".join(HERE if isinstance(piece, Picture) else piece for piece in pieces)

    def close(self) -> None:
        """There is no template process."""

    def _pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any] | None,
    ) -> list[str | Picture]:
        """Texts and pictures in turn. Raises RequestError as ``place``."""
        if tools:
            raise RequestError("this model's conversations have no tools")
        if options:
            raise RequestError(f"this model's conversations have no option {sorted(options)[0][:40]!r}")
        return _merged(self._written(_heard(messages), add_generation_prompt))

    def _written(self, told: Sequence[Said], add_generation_prompt: bool) -> list[str | Picture]:
        """The pieces of a conversation that may be had here."""
        system, pieces = SYSTEM, list[str | Picture]()
        for role, text, parts in told:
            if role == "system":
                system = text
            else:
                pieces += ["Human: " if role == "user" else "Assistant: ", *_turn(parts, role == "assistant"), END]
        return [system + END, *pieces, *([self._asks] if add_generation_prompt else [])]


class Questions(ImageChat):
    """BLIP-2 was trained on a picture with words behind it, and is asked "Question: … Answer:" (Li et al. 2023, §4).

    All pictures stand in front, then BOS and the turns; a picture without words is described.
    """

    prompt_counts = True

    def __init__(self, tokenizer: Tokenizer, tokens: int) -> None:
        super().__init__(tokenizer, tokens)
        self.stop_strings = ("\n",)

    def _written(self, told: Sequence[Said], add_generation_prompt: bool) -> list[str | Picture]:
        pictures: list[str | Picture] = [part for said in told for part in said.parts if isinstance(part, Picture)]
        turns: list[str] = []
        for role, text, _ in told:
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


def load_image_chat(files: Mapping[str, bytes], tokenizer: Tokenizer) -> ImageChat:
    """From image_chat.json beside the tokenizer's files. Raises TemplateError where it says nothing that is known."""
    told = read_json(files, FILE)
    tokens, prompt = told.get("tokens"), told.get("prompt")
    known = told.get("format") == BLIP2 or (told.get("format") == MINIGPT4 and prompt in ASKS)
    if not known or type(tokens) is not int or not 0 < tokens < 65536:
        raise TemplateError(f"{FILE} describes no known format of conversations with pictures; rebuild the engine")
    return Questions(tokenizer, tokens) if told["format"] == BLIP2 else ImageChat(tokenizer, tokens, prompt)


def with_prompt(files: Mapping[str, bytes], prompt: str) -> bytes:
    """image_chat.json with the other way of asking. Raises TemplateError where there is only one."""
    told = read_json(files, FILE)
    if told.get("format") != MINIGPT4:
        raise TemplateError(f"this model is asked in one way only; leave out the template {prompt!r}")
    return json.dumps({**told, "prompt": prompt}).encode()


def _heard(messages: object) -> list[Said]:
    """The messages, of roles and with parts that these formats have. Raises RequestError for others."""
    contents, plain = _split(messages)
    told = []
    for index, (message, parts) in enumerate(zip(checked(plain), contents, strict=True)):
        role = message["role"]
        if role not in ("user", "assistant", "system") or message.get("tool_calls"):
            raise RequestError(f"messages[{index}]: this model's conversations know system, user and assistant")
        if role == "system" and index:
            raise RequestError(f"messages[{index}]: the system message comes first")
        if role != "user" and any(isinstance(part, Picture) for part in parts):
            raise RequestError(f"messages[{index}]: pictures come from the user")
        told.append(Said(role, message["content"], parts))
    return told


def _split(messages: object) -> tuple[list[list[str | Picture]], Any]:
    """(each message's parts, the messages with texts alone, for everything else to be checked as usual)."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return [], messages  # which ``checked`` refuses
    contents: list[list[str | Picture]] = []
    plain: list[Any] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            contents.append([content] if isinstance(content, str) else [])
            plain.append(message)
            continue
        parts = [_picture(part, f"messages[{index}].content[{place}]") for place, part in enumerate(content)]
        texts = [part for part, picture in zip(content, parts, strict=True) if picture is None]
        contents.append(
            [_text(part) if picture is None else picture for part, picture in zip(content, parts, strict=True)]
        )
        plain.append({**message, "content": texts})
    return contents, plain


def _picture(part: Any, where: str) -> Picture | None:
    """The picture that a part of a message is; None for other parts."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image" and part.get("image") is not None and set(part) == {"type", "image"}:
        return Picture(part["image"], where)
    if kind == "image_url":
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        if not isinstance(url, str):
            raise RequestError(f'{where}: image_url must be {{"url": "data:image/png;base64,…"}}')
        return Picture(url, where, url=True)
    return None


def _text(part: Any) -> str:
    """A text part's text; what is none is named by ``checked`` afterwards."""
    text = part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else ""


def _turn(content: Sequence[str | Picture], answer: bool) -> list[str | Picture]:
    """A turn's pieces: a picture between its marks, a space between it and its neighbours, a line between texts."""
    out: list[str | Picture] = []
    before: str | Picture | None = None
    for part in content:
        if before is not None:
            out.append("\n" if isinstance(part, str) and isinstance(before, str) else " ")
        # upstream strips an answer before it becomes history
        out += [OPEN, part, CLOSE] if isinstance(part, Picture) else [part.strip() if answer else part]
        before = part
    return out


def _merged(pieces: Sequence[str | Picture]) -> list[str | Picture]:
    out: list[str | Picture] = []
    for piece in pieces:
        if isinstance(piece, str) and out and isinstance(out[-1], str):
            out[-1] += piece
        else:
            out.append(piece)
    return out
