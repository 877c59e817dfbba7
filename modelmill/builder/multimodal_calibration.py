"""Calibration of a model that reads images: conversations about images, and texts.

A line of the jsonl may name images ("image": a path, "images": several; paths are relative to the
file) with a question or text ("text"), and an answer ("answer" or "caption"); or it has "messages"
with images as in a chat. Without a file, images and conversations are generated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modelmill.builder.calibration_data import (
    IMAGE_KEYS,
    TEXT_KEYS,
    CalibrationSample,
    CalibrationSource,
    TokenChunker,
    generate_builtin_text,
    read_jsonl_objects,
    text_from_line,
)
from modelmill.core.errors import RequestError, UsageError
from modelmill.core.quoting import quote
from modelmill.nn.layer_stack import vision_encoder_stacks
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.registry import Ops
from modelmill.text.image_chat import ImageChatFormat, ImagePart, load_image_chat_format
from modelmill.text.tokenizer_loader import load_tokenizer
from modelmill.vision.image_input import decode_data_url, load_image_stretched_to_square

ANSWER_KEYS = ("answer", "caption")
IMAGE_BATCH_SIZE = 8  # images per batch of the vision encoder
GENERATED_SEQUENCES_PER_IMAGE = 4  # one in so many generated sequences has an image
CALIBRATION_QUESTIONS = (
    "Describe this image in detail.",
    "What is in the picture?",
    "Where was this taken, and what has happened?",
)
BUILTIN_IMAGES_MARKER = "drawn"  # generated


def with_images_digest(source: CalibrationSource) -> CalibrationSource:
    """Return the source with a hash of its images, so that changed images change the engine.

    Raises:
        UsageError: if an image is missing.
    """
    if source.path is None:
        return replace(source, image_digest=BUILTIN_IMAGES_MARKER)
    digest, any_shown = hashlib.sha256(), False
    for number, value in read_jsonl_objects(source.path):
        for picture in _images_in_line(value, source.path, number):
            data = (
                picture.encode("utf-8", "surrogatepass")
                if isinstance(picture, str)
                else _read_image_file(picture, source.path, number)
            )
            digest.update(hashlib.sha256(data).digest())
            any_shown = True
    return replace(source, image_digest=digest.hexdigest() if any_shown else "")


def load_multimodal_samples(
    source: CalibrationSource, files: Mapping[str, bytes], image_size: int
) -> list[CalibrationSample]:
    """Load sequences of at most ``max_length`` tokens, none of which ends inside an image.

    The result is the same on every machine. A line with images is a sequence of its own; texts are
    joined and cut as in ``load_calibration_ids``.

    Raises:
        UsageError: for a missing or invalid image or a line without text; it names the line.
    """
    tokenizer = load_tokenizer(files)
    chat = load_image_chat_format(files, tokenizer)
    samples: list[CalibrationSample] = []
    texts = TokenChunker(source.max_length)
    for where, value in (
        generate_builtin_conversations(image_size)
        if source.path is None
        else _read_conversations(source.path)
    ):
        if isinstance(value, str):
            samples += [
                CalibrationSample(ids)
                for ids in texts.add_and_take_full(tokenizer.encode(value, bos=False))
            ]
        else:
            samples.append(_tokenize_conversation(value, chat, source, image_size, where))
        if len(samples) >= source.num_samples:
            return samples[: source.num_samples]
    return [*samples, *(CalibrationSample(ids) for ids in texts.remainder())]


@torch.inference_mode()
def encode_images_releasing_embedder(
    model: Any, images: torch.Tensor, load_submodules: Callable[[str], None], ops: Ops
) -> torch.Tensor:
    """Encode images [N, S, S, 3] uint8, with one block of the vision encoder in memory.

    load_submodules: loads the modules below a prefix; ``model.image_embedder`` is empty afterwards.

    Returns:
        Embeddings [N, 32, hidden] float32 on the CPU.
    """
    embedder, vision = model.image_embedder, VisionContext(ops)
    encoder = embedder.visual_encoder
    blocks = vision_encoder_stacks(model)[0].path
    path, _, list_name = blocks.rpartition(".")
    for name in tensor_prefixes_except_child(encoder, list_name):
        load_submodules(f"{path}.{name}")
    device = encoder.pos_embed.device
    batches = [
        model.normalize(some.to(device).permute(0, 3, 1, 2))
        for some in images.split(IMAGE_BATCH_SIZE)
    ]
    image_tokens = [encoder.embed_patches_and_positions(some) for some in batches]
    for number, block in enumerate(encoder.blocks):
        load_submodules(f"{blocks}.{number}.")
        image_tokens = [block(some, vision) for some in image_tokens]
        encoder.blocks[number] = nn.Identity()
    path, _, encoder_name = path.rpartition(".")
    for name in tensor_prefixes_except_child(embedder, encoder_name):
        load_submodules(f"{path}.{name}")
    embeddings = torch.cat(
        [embedder.run_qformer_and_project(some, vision).float().cpu() for some in image_tokens]
    )
    model.image_embedder = nn.Identity()
    return embeddings


def tensor_prefixes_except_child(module: nn.Module, left_out: str) -> list[str]:
    """Return the prefixes of a module's tensors, but for those below one child."""
    buffers = [name for name, _ in module.named_buffers(recurse=False)]
    return buffers + [f"{name}." for name, _ in module.named_children() if name != left_out]


def generate_builtin_conversations(image_size: int) -> Iterator[tuple[str, Any]]:
    """Yield (where, text or messages): generated paragraphs, every fourth with a drawn image."""
    for number, text in enumerate(generate_builtin_text().split("\n\n")):
        if number % GENERATED_SEQUENCES_PER_IMAGE:
            yield "our own", text
            continue
        question = [
            {"type": "image", "image": draw_synthetic_image(number, image_size)},
            {
                "type": "text",
                "text": CALIBRATION_QUESTIONS[
                    number // GENERATED_SEQUENCES_PER_IMAGE % len(CALIBRATION_QUESTIONS)
                ],
            },
        ]
        yield (
            "our own",
            [{"role": "user", "content": question}, {"role": "assistant", "content": text}],
        )


def draw_synthetic_image(seed: int, image_size: int) -> np.ndarray:
    """Draw an image [side, side, 3] uint8: discs, boxes and stripes on a gradient, with noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:image_size, :image_size] / image_size
    slope = random.uniform(-120, 120, (2, 3))
    canvas = random.uniform(40, 215, 3) + x[..., None] * slope[0] + y[..., None] * slope[1]
    for _ in range(int(random.integers(3, 9))):
        cx, cy, size = random.uniform((0, 0, 0.03), (1, 1, 0.3)).tolist()
        shape_type = int(random.integers(3))
        inside = (
            (x - cx) ** 2 + (y - cy) ** 2 < size**2,
            (np.abs(x - cx) < size) & (np.abs(y - cy) < size * random.uniform(0.2, 2)),
            np.sin((x * random.uniform(-1, 1) + y) * random.uniform(10, 90)) > 0.7,
        )[shape_type]
        canvas[inside] = random.uniform(0, 255, 3)
    canvas += random.normal(0, random.uniform(1, 12), canvas.shape)
    image: np.ndarray = np.clip(np.rint(canvas), 0, 255).astype(np.uint8)
    return image


def _read_conversations(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (where, text or messages) of each line."""
    for number, value in read_jsonl_objects(path):
        where = f"--calibration {path}, line {number}"
        shown = _images_in_line(value, path, number)
        if not shown:
            text = text_from_line(value, path, number)
            if not text.strip():
                raise UsageError(f"{where}: is empty")
            yield where, text
        elif isinstance(value.get("messages"), list) and not IMAGE_KEYS & set(value):
            yield where, _with_absolute_image_paths(value["messages"], path)
        else:
            yield where, _build_image_conversation(value, shown, where)


def _build_image_conversation(
    line: Mapping[str, Any], images: list[Any], location: str
) -> list[dict[str, Any]]:
    """Return the conversation of a line with images, a question and possibly an answer."""
    question = next((line[key] for key in TEXT_KEYS if isinstance(line.get(key), str)), "").strip()
    answer = next((line[key] for key in ANSWER_KEYS if isinstance(line.get(key), str)), "").strip()
    if not question and not answer:
        raise UsageError(
            f"{location}: has an image and no text; add a text, an answer or a caption"
        )
    parts: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in images]
    talk: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [*parts, *([{"type": "text", "text": question}] if question else [])],
        }
    ]
    return [*talk, {"role": "assistant", "content": answer}] if answer else talk


def _images_in_line(line: Mapping[str, Any], path: Path, line_number: int) -> list[Any]:
    """Return the images of a line: paths, or data URLs.

    Raises:
        UsageError: if an entry is not a string.
    """
    named = line.get("image", line.get("images", []))
    listed = named if isinstance(named, list) else [named]
    if any(not isinstance(each, str) or not each for each in listed):
        raise UsageError(
            f"--calibration {path}, line {line_number}: image must be a path, "
            "images a list of paths"
        )
    images: list[Any] = [path.parent / each for each in listed]
    turns = line.get("messages")
    for turn in turns if isinstance(turns, list) else []:
        content = turn.get("content") if isinstance(turn, dict) else None
        for part in content if isinstance(content, list) else []:
            part_type = part.get("type") if isinstance(part, dict) else None
            if part_type == "image" and isinstance(part.get("image"), str):
                images.append(path.parent / part["image"])
            elif part_type == "image_url":
                url = part.get("image_url")
                images.append(str(url.get("url") if isinstance(url, dict) else url))
    return images


def _with_absolute_image_paths(messages: list[Any], path: Path) -> list[Any]:
    """Return the messages with absolute image paths."""

    def part(value: Any) -> Any:
        named = (
            isinstance(value, dict)
            and value.get("type") == "image"
            and isinstance(value.get("image"), str)
        )
        return {**value, "image": path.parent / value["image"]} if named else value

    return [
        {**turn, "content": [part(each) for each in turn["content"]]}
        if isinstance(turn, dict) and isinstance(turn.get("content"), list)
        else turn
        for turn in messages
    ]


def _tokenize_conversation(
    messages: Any, chat: ImageChatFormat, source: CalibrationSource, image_size: int, location: str
) -> CalibrationSample:
    try:
        asks = isinstance(messages[-1], Mapping) and messages[-1].get("role") == "user"
        ids, places = chat.encode_with_images(messages, add_generation_prompt=asks)
        shown = {position: _load_pixels(picture, image_size) for position, picture in places}
    except RequestError as error:
        raise UsageError(f"{location}: {error}") from None
    # an image is never cut: the sequence ends before an image that does not fit
    cut = min(
        [source.max_length, *(at for at in shown if at + chat.image_tokens > source.max_length)]
    )
    kept = {at: picture for at, picture in shown.items() if at + chat.image_tokens <= cut}
    if shown and not kept:
        raise UsageError(
            f"{location}: an image takes {chat.image_tokens} tokens after {min(shown)}, more "
            "than a sequence of "
            f"{source.max_length} holds; raise --calibration-length"
        )
    return CalibrationSample(ids[:cut], kept)


def _load_pixels(picture: ImagePart, image_size: int) -> np.ndarray:
    value = decode_data_url(picture.source, picture.location) if picture.is_url else picture.source
    return load_image_stretched_to_square(value, image_size, picture.location)[0]


def _read_image_file(picture: Path, path: Path, line_number: int) -> bytes:
    try:
        return picture.read_bytes()
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise UsageError(f"--calibration {path}, line {line_number}: {picture}: {reason}") from None
    except ValueError:  # a NUL, or half a surrogate pair
        raise UsageError(
            f"--calibration {path}, line {line_number}: {quote(str(picture))} is not a valid path"
        ) from None
