"""The file of an engine's tokenizer that names a built-in chat format (``text.prompt_format``)."""

from __future__ import annotations

import json

CHAT_FORMAT_FILE = "chat_format.json"


def encode_chat_format_file(name: str) -> bytes:
    """Return the content of chat_format.json."""
    return json.dumps({"name": name}).encode()
