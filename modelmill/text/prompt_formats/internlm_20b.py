"""InternLM-Chat-20B and 7B-v1.1 (InternLM 1): as InternLM-Chat-7B, without <eoh>.

Facts: internlm/internlm-chat-20b, modeling_internlm.py (``build_inputs``).
"""

from __future__ import annotations

from modelmill.text.prompt_formats.internlm import InternLMFormat


class InternLM20BFormat(InternLMFormat):
    """BOS, then "<|User|>:…" and "<|Bot|>:…<eoa>", a line each, as one text."""

    name = "internlm_20b"
    question_end = ""


FORMAT = InternLM20BFormat
