"""llama.cpp's options of a server, as its tests set them, and the nearest ones of ``serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{{ message['content'] | map(attribute='text') | join('\n') }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What llama.cpp's server takes for a model without a chat template."""
STORIES = "ggml-org/test-model-stories260K"
STAND_INS = {STORIES: "", "ggml-org/models": "", None: "a router without models of its own"}
"""Models by repository whose tests run with the small one; of others, and of no model: why not."""
UNAVAILABLE_OPTIONS = {
    "lora_files": "LoRA adapters",
    "model_draft": "speculative decoding",
    "spec_type": "speculative decoding",
    "slot_save_path": "slots saved by number (here: /v1/sessions)",
    "models_dir": "a router (here: a catalogue)",
    "models_preset": "a router (here: a catalogue)",
    "sleep_idle_seconds": "a server that sleeps (here: keep_alive of a catalogue)",
    "server_tools": "tools that the server runs itself",
    "mcp_servers_config": "MCP servers that the server runs",
    "mcp_servers_json": "MCP servers that the server runs",
    "ui_mcp_proxy": "a proxy for the page",
    "enable_ctx_shift": "a context that drops its beginning (here: finish reason length)",
    "gcp_compat": "Google's /predict",
    "log_path": "lines of llama.cpp's log",
    "no_ui": "a switch that removes the page",
    "media_path": "pictures from the server's disk",
    "mmproj_url": "a model that sees pictures",
}
"""Options that ``serve`` lacks, and what they are."""
KV_CACHE_BYTES = 1 << 26


def missing_feature(server: Any) -> str:
    """What a test's server needs that ``serve`` lacks, from its options; "" if nothing.

    Args:
        server: llama.cpp's ServerProcess before its start.
    """
    for option, feature in UNAVAILABLE_OPTIONS.items():
        if getattr(server, option, None):
            return feature
    if "," in server.server_host:
        return "a server at several addresses"
    if server.pooling == "none":
        return "embeddings of each token"
    if server.reasoning == "off":
        return "a server that never thinks (here: a field of the request)"
    if server.chat_template and server.chat_template != "chatml" and _is_name(server.chat_template):
        return "a chat template that is part of llama.cpp"
    if server.cors_origins:
        return ""
    repository = server.model_hf_repo
    if "split" in (server.model_hf_file or ""):
        return "another model"
    return STAND_INS.get(repository, f"another model ({repository})")


def _is_name(template: str) -> bool:
    return " " not in template and "{" not in template


def serve_flags(server: Any, folder: Path) -> tuple[str, ...]:
    """Flags of ``serve`` for a test's server.

    Args:
        server: llama.cpp's ServerProcess before its start.
        folder: for a file with a chat template.
    """
    flags = ["--device", "cpu", "--kv-cache-bytes", str(KV_CACHE_BYTES)]
    slots = server.n_slots or 1
    if server.n_ctx:
        # a pool that slots share has room for one long request
        length = server.n_ctx if server.kv_unified else server.n_ctx // slots
        flags += ["--max-model-len", str(length)]
    flags += ["--max-num-seqs", str(slots)]
    if server.n_batch:
        flags += ["--max-num-batched-tokens", str(max(server.n_batch, slots))]
    if server.api_key:
        flags += ["--api-key", server.api_key]
    flags += ["--allowed-origins", server.cors_origins or "*"]
    return *flags, "--chat-template", _template(server, folder)


def _template(server: Any, folder: Path) -> str:
    if server.chat_template_file:
        return str(Path(server.chat_template_file).resolve())
    template = server.chat_template
    if template in (None, "chatml"):
        template = CHATML
    path = folder / "template.jinja"
    path.write_text(template, "utf-8")
    return str(path)


def served_names(server: Any) -> tuple[str, ...]:
    """Names of the model."""
    return tuple((server.model_alias or "model").split(","))


def with_defaults(server: Any, path: str, data: Any) -> Any:
    """A request's body with what llama.cpp's server takes from its options.

    Args:
        server: llama.cpp's ServerProcess.
        path: of the request.
        data: its body; returned as it is where the path is none of a completion.
    """
    if not isinstance(data, dict) or not path.endswith(("/completion", "/completions", "/infill")):
        return data
    defaults: dict[str, Any] = {"temperature": server.temperature, "seed": server.seed}
    if server.n_predict and not {"max_tokens", "n_predict", "max_completion_tokens"} & data.keys():
        defaults["n_predict"] = server.n_predict
    return {**defaults, **data}
