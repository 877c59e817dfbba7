"""DeepSeek V4: as V3.2 with another name of the outer tag."""

from dataclasses import replace

from modelmill.text.chat_formats import deepseek_v32

FORMAT = replace(
    deepseek_v32.FORMAT,
    title="DeepSeek V4",
    detect=(("DSML", "tool_calls>", "_calls"),),
    calls=deepseek_v32.dsml_call_syntax("tool_calls"),
)
