"""The built-in chat format of a checkpoint without a chat template, by its family.

These families published the format of their conversations as code beside the weights, not as a
template. ``chat_format.json`` among the tokenizer's files names it (``text.prompt_format``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from modelmill.core.chat_format_file import CHAT_FORMAT_FILE as CHAT_FORMAT_FILE
from modelmill.core.chat_format_file import encode_chat_format_file

INTERNLM_20B_LAYERS = 60


def add_builtin_chat_format(
    files: Mapping[str, bytes], config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> dict[str, bytes]:
    """Return a tokenizer's files with chat_format.json, if the family has a built-in format.

    Args:
        files: by name; without a vocabulary or with a chat template they stay as they are.
        config: of the checkpoint.
        generation_config: of the checkpoint.
    """
    choose = _CHOICES.get(str(config.get("model_type")))
    if choose is None or not files or _has_chat_template(files):
        return dict(files)
    name = choose(
        _Configs(config, generation_config, _json_object_or_empty(files, "tokenizer_config.json"))
    )
    chosen = {} if name is None else {CHAT_FORMAT_FILE: encode_chat_format_file(name)}
    return {**files, **chosen}


def chat_format_remark(files: Mapping[str, bytes]) -> str:
    """Return one line about the built-in chat format that was chosen; "" if none was."""
    if CHAT_FORMAT_FILE not in files:
        return ""
    name = _json_object_or_empty(files, CHAT_FORMAT_FILE).get("name")
    return (
        f"{name}: built in for this family, since the checkpoint has no chat template; a base "
        "model was not trained on it"
    )


def _has_chat_template(files: Mapping[str, bytes]) -> bool:
    """Whether one of the files has a chat template; one that cannot be read has it as well."""
    if any(name.endswith(".jinja") for name in files) or "image_chat.json" in files:
        return True
    keys = ("chat_template", "tokenizer.chat_template")
    names = ("tokenizer_config.json", "chat_template.json", "gguf_vocab.json")
    return any(
        _json_object_or_empty(files, name).get(key)
        for name in names
        if name in files
        for key in keys
    )


def _json_object_or_empty(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return a JSON object; {} for other content, which the tokenizer's loader refuses by name."""
    try:
        value = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class _Configs(NamedTuple):
    """The JSON files of a checkpoint that tell its chat format."""

    model: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer: Mapping[str, Any]


def _choose_baichuan(files: _Configs) -> str | None:
    """Base models name no ids of the roles."""
    roles = {"user_token_id", "assistant_token_id"}
    return "baichuan" if roles <= files.generation.keys() else None


def _choose_chatglm(files: _Configs) -> str | None:
    """ChatGLM2 and 3 have the same sizes and tokens; names in their configs tell them apart."""
    names = f"{files.tokenizer.get('name_or_path')} {files.model.get('_name_or_path')}".lower()
    if "base" in names:
        return None
    found = [name for name in ("chatglm2", "chatglm3") if name in names]
    named_tokens = str(files.tokenizer.get("added_tokens_decoder", ""))
    # GLM-4 has "<sop>", and is another format
    if not found and "<|assistant|>" in named_tokens and "'sop'" in named_tokens:
        return "chatglm3"
    return found[0] if len(found) == 1 else None


def _choose_internlm(files: _Configs) -> str | None:
    deep = files.model.get("num_hidden_layers") == INTERNLM_20B_LAYERS
    return "internlm_20b" if deep else "internlm"


def _choose_falcon(files: _Configs) -> str | None:
    """Falcon-RW, with ALiBi, has no instructed model."""
    return None if files.model.get("alibi") else "falcon"


_CHOICES: Mapping[str, Callable[[_Configs], str | None]] = {
    "baichuan": _choose_baichuan,
    "chatglm": _choose_chatglm,
    "internlm": _choose_internlm,
    "xverse": lambda _: "xverse",
    "falcon": _choose_falcon,
}
