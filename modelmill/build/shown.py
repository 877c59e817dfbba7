"""Calibration of a model with eyes: conversations about pictures beside texts.

A line of the jsonl may name pictures ("image": a path, "images": several; paths are relative to the file) with what is
asked or said about them ("text"), and an answer ("answer" or "caption"); or it holds "messages" with pictures as a chat
has them. Without a file pictures of our own are drawn and talked about in our own words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modelmill.build.calibration import KEYS, PICTURES, Joined, Source, lines_of, load_ids, own_text, text_of
from modelmill.core.errors import RequestError, UsageError
from modelmill.core.quote import quoted
from modelmill.nn.still import Still
from modelmill.ops.shelf import Ops
from modelmill.quant.calibrate import check_ids
from modelmill.text.image_chat import FILE, ImageChat, Picture, load_image_chat
from modelmill.text.tokenizer import load_tokenizer
from modelmill.vision.square import from_url, square

ANSWERS = ("answer", "caption")
BATCH = 8  # pictures through the eyes at once
TALKED = 4  # of our own sequences, one in so many is about a picture
ASKED = ("Describe this image in detail.", "What is in the picture?", "Where was this taken, and what has happened?")
READER = "reader."
DRAWN = "drawn"  # by us


@dataclass(frozen=True)
class Sample:
    """ids of one sequence; pictures [S, S, 3] uint8 by the position of their first place."""

    ids: list[int]
    pictures: Mapping[int, np.ndarray] = field(default_factory=dict)


def with_pictures(source: Source) -> Source:
    """The source with its pictures hashed: others under the same names make another engine. Raises UsageError."""
    if source.path is None:
        return replace(source, shown=DRAWN)
    digest, any_shown = hashlib.sha256(), False
    for number, value in lines_of(source.path):
        for picture in _pictures(value, source.path, number):
            data = (
                picture.encode("utf-8", "surrogatepass")
                if isinstance(picture, str)
                else _read(picture, source.path, number)
            )
            digest.update(hashlib.sha256(data).digest())
            any_shown = True
    return replace(source, shown=digest.hexdigest() if any_shown else "")


def samples_of(source: Source, files: Mapping[str, bytes], model: Any, seed: int) -> list[Sample]:
    """Calibration sequences of a model with eyes or without. Raises UsageError for data that is no good."""
    vocab = int(model.config.vocab)
    if has_eyes(files):
        found = load_samples(source, files, int(model.image_size))
    else:
        found = [Sample(ids) for ids in load_ids(source, files, vocab, seed)]
    name = "the calibration data" if source.path is None else f"--calibration {source.path}"
    check_ids([sample.ids for sample in found], vocab, name)
    return found


def embedded(
    samples: Sequence[Sample], model: Any, put: Callable[[str], None], ops: Ops
) -> list[dict[int, torch.Tensor]]:
    """Embeddings of each sample's pictures, by their places, as ``look`` makes them."""
    pictures = [torch.as_tensor(picture) for sample in samples for picture in sample.pictures.values()]
    if not pictures:
        return [{} for _ in samples]
    found = iter(look(model, torch.stack(pictures), put, ops))
    return [{position: next(found) for position in sample.pictures} for sample in samples]


def load_samples(source: Source, files: Mapping[str, bytes], side: int) -> list[Sample]:
    """Sequences of at most ``length`` tokens, none of which ends inside a picture; the same on every machine.

    A line with pictures is a sequence of its own, texts are joined and cut as ``calibration.load_ids`` does. Raises
    UsageError, which names the line, for a picture that is missing or none and for a line that says nothing.
    """
    tokenizer = load_tokenizer(files)
    chat = load_image_chat(files, tokenizer)
    found: list[Sample] = []
    texts = Joined(source.length)
    for where, value in own_lines(side) if source.path is None else _lines(source.path):
        if isinstance(value, str):
            found += [Sample(ids) for ids in texts.add(tokenizer.encode(value, bos=False))]
        else:
            found.append(_sample(value, chat, source, side, where))
        if len(found) >= source.samples:
            return found[: source.samples]
    return [*found, *(Sample(ids) for ids in texts.left())]


def has_eyes(files: Mapping[str, bytes]) -> bool:
    """Whether conversations of a checkpoint with these files may hold pictures."""
    return FILE in files


@torch.inference_mode()
def look(model: Any, pictures: torch.Tensor, put: Callable[[str], None], ops: Ops) -> torch.Tensor:
    """Embeddings [N, 32, hidden] float32 on the CPU of pictures [N, S, S, 3] uint8, one block of the tower in memory.

    put: fill what the prefix names; ``model.reader`` is empty afterwards.
    """
    reader, still = model.reader, Still(ops)
    tower = reader.visual_encoder
    for name in ("cls_token", "pos_embed", "patch_embed."):
        put(f"{READER}visual_encoder.{name}")
    device = tower.pos_embed.device
    batches = [model.normalised(some.to(device).permute(0, 3, 1, 2)) for some in pictures.split(BATCH)]
    seen = [tower.start(some) for some in batches]
    for number, block in enumerate(tower.blocks):
        put(f"{READER}visual_encoder.blocks.{number}.")
        seen = [block(some, still) for some in seen]
        tower.blocks[number] = nn.Identity()
    for name in ("ln_vision.", "qformer.", "proj."):
        put(READER + name)
    told = torch.cat([reader.told(some, still).float().cpu() for some in seen])
    model.reader = nn.Identity()
    return told


def own_lines(side: int, seed: int = 0) -> Iterator[tuple[str, Any]]:
    """(where, text or messages): our own paragraphs, every fourth about a picture drawn for it."""
    for number, text in enumerate(own_text(seed).split("\n\n")):
        if number % TALKED:
            yield "our own", text
            continue
        asked = [
            {"type": "image", "image": drawn(number, side)},
            {"type": "text", "text": ASKED[number // TALKED % len(ASKED)]},
        ]
        yield "our own", [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]


def drawn(seed: int, side: int) -> np.ndarray:
    """[side, side, 3] uint8: discs, boxes and stripes of all colours on a slope, with grain."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:side, :side] / side
    slope = random.uniform(-120, 120, (2, 3))
    canvas = random.uniform(40, 215, 3) + x[..., None] * slope[0] + y[..., None] * slope[1]
    for _ in range(int(random.integers(3, 9))):
        cx, cy, size = random.uniform((0, 0, 0.03), (1, 1, 0.3)).tolist()
        kind = int(random.integers(3))
        inside = (
            (x - cx) ** 2 + (y - cy) ** 2 < size**2,
            (np.abs(x - cx) < size) & (np.abs(y - cy) < size * random.uniform(0.2, 2)),
            np.sin((x * random.uniform(-1, 1) + y) * random.uniform(10, 90)) > 0.7,
        )[kind]
        canvas[inside] = random.uniform(0, 255, 3)
    canvas += random.normal(0, random.uniform(1, 12), canvas.shape)
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8)


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, text or messages) of each line."""
    for number, value in lines_of(path):
        where = f"--calibration {path}, line {number}"
        shown = _pictures(value, path, number)
        if not shown:
            text = text_of(value, path, number)
            if not text.strip():
                raise UsageError(f"{where}: is empty")
            yield where, text
        elif isinstance(value.get("messages"), list) and not PICTURES & set(value):
            yield where, _absolute(value["messages"], path)
        else:
            yield where, _talk(value, shown, where)


def _talk(value: Mapping[str, Any], shown: list[Any], where: str) -> list[dict[str, Any]]:
    """A conversation of a line with pictures, a question and perhaps an answer."""
    asked = next((value[key] for key in KEYS if isinstance(value.get(key), str)), "").strip()
    told = next((value[key] for key in ANSWERS if isinstance(value.get(key), str)), "").strip()
    if not asked and not told:
        raise UsageError(f"{where}: shows a picture and says nothing; give a text, an answer or a caption")
    parts: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in shown]
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": [*parts, *([{"type": "text", "text": asked}] if asked else [])]}
    ]
    return [*talk, {"role": "assistant", "content": told}] if told else talk


def _pictures(value: Mapping[str, Any], path: Path, number: int) -> list[Any]:
    """The pictures that a line names: paths, or the texts of data URLs. Raises UsageError for what is no name."""
    named = value.get("image", value.get("images", []))
    listed = named if isinstance(named, list) else [named]
    if any(not isinstance(each, str) or not each for each in listed):
        raise UsageError(f"--calibration {path}, line {number}: image is a path, images a list of paths")
    found: list[Any] = [path.parent / each for each in listed]
    turns = value.get("messages")
    for turn in turns if isinstance(turns, list) else []:
        content = turn.get("content") if isinstance(turn, dict) else None
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "image" and isinstance(part.get("image"), str):
                found.append(path.parent / part["image"])
            elif kind == "image_url":
                url = part.get("image_url")
                found.append(str(url.get("url") if isinstance(url, dict) else url))
    return found


def _absolute(messages: list[Any], path: Path) -> list[Any]:
    """The messages with the paths of their pictures beside the file."""

    def part(given: Any) -> Any:
        named = isinstance(given, dict) and given.get("type") == "image" and isinstance(given.get("image"), str)
        return {**given, "image": path.parent / given["image"]} if named else given

    return [
        {**turn, "content": [part(each) for each in turn["content"]]}
        if isinstance(turn, dict) and isinstance(turn.get("content"), list)
        else turn
        for turn in messages
    ]


def _sample(messages: Any, chat: ImageChat, source: Source, side: int, where: str) -> Sample:
    try:
        asks = isinstance(messages[-1], Mapping) and messages[-1].get("role") == "user"
        ids, places = chat.place(messages, add_generation_prompt=asks)
        shown = {position: _pixels(picture, side) for position, picture in places}
    except RequestError as error:
        raise UsageError(f"{where}: {error}") from None
    # a picture is never cut: the sequence ends before one that does not fit
    cut = min([source.length, *(at for at in shown if at + chat.tokens > source.length)])
    kept = {at: picture for at, picture in shown.items() if at + chat.tokens <= cut}
    if shown and not kept:
        raise UsageError(
            f"{where}: a picture takes {chat.tokens} tokens behind {min(shown)}, more than a sequence of "
            f"{source.length} holds; raise --calibration-length"
        )
    return Sample(ids[:cut], kept)


def _pixels(picture: Picture, side: int) -> np.ndarray:
    given = from_url(picture.source, picture.where) if picture.url else picture.source
    return square(given, side, picture.where)[0]


def _read(picture: Path, path: Path, number: int) -> bytes:
    try:
        return picture.read_bytes()
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise UsageError(f"--calibration {path}, line {number}: {picture}: {reason}") from None
    except ValueError:  # a NUL, or half a surrogate pair
        raise UsageError(f"--calibration {path}, line {number}: {quoted(str(picture))} is no path") from None
