"""Another chat template in the place of the one among a tokenizer's files (--chat-template)."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from modelmill.core.chat_format_file import encode_chat_format_file
from modelmill.core.errors import UsageError
from modelmill.text.chat_format_loader import EXTRA_TEMPLATES_FOLDER
from modelmill.text.image_chat import IMAGE_CHAT_FILE as IMAGE_CHAT
from modelmill.text.image_chat import replace_prompt_style
from modelmill.text.prompt_format import (
    CHAT_FORMAT_FILE,
    list_prompt_formats,
)


def replace_chat_template(files: dict[str, bytes], source: str | Path) -> dict[str, bytes]:
    """The tokenizer's files with another chat template or format, or MiniGPT-4 prompt style.

    Raises:
        UsageError: the source is neither a file nor a template, or cannot be read.
    """
    style = {"minigpt4": "first", "minigpt4-current": "current"}.get(str(source))
    if style is not None and IMAGE_CHAT in files:
        return {**files, IMAGE_CHAT: replace_prompt_style(files, style)}
    # no other format has images: the conversation becomes text-only
    others = {
        name: data
        for name, data in files.items()
        if name not in (IMAGE_CHAT, CHAT_FORMAT_FILE)
        and not name.startswith(f"{EXTRA_TEMPLATES_FOLDER}/")
    }
    if str(source) in list_prompt_formats():
        return {**others, CHAT_FORMAT_FILE: encode_chat_format_file(str(source))}
    return {**others, "chat_template.jinja": _read_template_source(source)}


def list_chat_templates() -> list[str]:
    """Return the names that --chat-template takes: templates and formats of families."""
    folder = resources.files("modelmill.text") / "templates"
    templates = [
        file.name.removesuffix(".jinja")
        for file in folder.iterdir()
        if file.name.endswith(".jinja")
    ]
    return sorted([*templates, *list_prompt_formats()])


def _read_template_source(source: str | Path) -> bytes:
    """Read a chat template: a built-in one's name (vicuna, chatml), a file, or template text."""
    built_in = resources.files("modelmill.text") / "templates" / f"{source}.jinja"
    try:
        if str(source).isidentifier() and built_in.is_file():
            return built_in.read_bytes()
        path = Path(source)
        if len(str(source)) < 1024 and path.is_file():
            return path.read_bytes()
    except OSError as error:
        raise UsageError(f"--chat-template {source}: {error.strerror}") from None
    if "{" not in str(source):
        raise UsageError(
            f"--chat-template {source}: neither a file nor a template; built in are "
            f"{', '.join(list_chat_templates())}"
        )
    return str(source).encode()
