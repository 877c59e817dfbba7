"""The last message of a conversation as the beginning of the answer (continue_final_message)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.text.answer_grammar import PromptThinking
from modelmill.text.answer_pieces import BegunPart
from modelmill.text.chat_syntax import ThinkingSyntax
from modelmill.text.message_validation import join_text_parts, validate_and_normalize_messages
from modelmill.text.template_process import TemplateRefusedMessages

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""Renders messages, with the generation prompt or without."""
_THINKING_KEYS = ("reasoning_content", "thinking")


@dataclass(frozen=True)
class AssistantPrefill:
    """What the last message has begun: thinking, and content if the thinking is over."""

    content: str = ""
    reasoning: str = ""

    @property
    def part(self) -> BegunPart:
        """What the answer goes on with."""
        return "content" if self.content else "reasoning" if self.reasoning else ""

    @property
    def text(self) -> str:
        """The begun text of that part."""
        return self.content or self.reasoning

    def prompt_thinking(self, thinking: ThinkingSyntax | None) -> PromptThinking:
        """What the prompt says of the thinking; thinking: marks of the chat format."""
        if thinking is None or not self.part:
            return "free"
        return "closed" if self.content else "open"


def check_continued_messages(
    messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool | None
) -> None:
    """Check that a request may continue its last message.

    Raises:
        RequestError: it asks for a generation prompt, or the last message is of another kind.
    """
    if add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: the answer has "
            "begun already"
        )
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        raise RequestError(
            "continue_final_message needs a last message of the assistant without tool_calls"
        )


def parse_assistant_prefill(
    messages: Sequence[Mapping[str, Any]], thinking: ThinkingSyntax | None
) -> AssistantPrefill:
    """Read the last message of a conversation.

    Args:
        messages: the conversation.
        thinking: marks of the thinking of the chat format.

    Raises:
        RequestError: the message is invalid, the only one, or begins a thinking that the format
            does not have.
    """
    *history, last = messages
    if not history:
        raise RequestError("continue_final_message needs a message before the last one")
    name = f"messages[{len(history)}]"
    try:
        message = validate_and_normalize_messages([last], as_sent=True)[0]
    except RequestError as error:
        raise RequestError(str(error).replace("messages[0]", name, 1)) from None
    begun = AssistantPrefill(_content_text(message), message.get("reasoning_content", ""))
    if begun.part == "reasoning" and thinking is None:
        raise RequestError(
            f"{name}: reasoning_content cannot be continued: the chat template of this model has "
            "no thinking; give content"
        )
    return begun


def render_assistant_prefill(
    render: Render,
    messages: Sequence[Mapping[str, Any]],
    thinking: ThinkingSyntax | None,
    ends: tuple[str, str],
) -> tuple[str, str]:
    """Render a conversation up to the end of what its last message has begun.

    The message is rendered as any other and cut behind its text, as transformers does. A thinking
    that the template leaves out, or a message that it refuses, is written behind the generation
    prompt.

    Args:
        render: renders messages as the template reads them.
        messages: the conversation.
        thinking: marks of the thinking.
        ends: two characters that occur nowhere in the conversation or the template.

    Returns:
        The prompt in two parts. The second is the begun text if it stands directly behind the
        generation prompt, as if the model had written it, else empty.
    """
    *history, last = messages
    end, reasoning_end = ends
    begun = AssistantPrefill(_content_text(last), last.get("reasoning_content", ""))
    prompt = render(history, True)
    if not begun.part:
        return prompt, ""
    try:
        whole = render([*history, _mark_message_text_ends(last, begun, ends)], False)
    except TemplateRefusedMessages:
        whole = ""
    text, found, _ = whole.rpartition(end)
    has_thinking = bool(begun.content and begun.reasoning.strip() and thinking)
    if not found or (has_thinking and reasoning_end not in text):
        text = _append_prefill_to_prompt(prompt, begun, thinking)
    text = text.replace(reasoning_end, "")
    return (prompt, begun.text) if text == prompt + begun.text else (text, "")


def _mark_message_text_ends(
    message: Mapping[str, Any], begun: AssistantPrefill, ends: tuple[str, str]
) -> dict[str, Any]:
    """The message with characters behind its content and behind its thinking."""
    end, reasoning_end = ends
    out, content = dict(message), message.get("content")
    if not begun.content:
        return out | {key: f"{out[key]}{end}" for key in _THINKING_KEYS if key in out}
    if isinstance(content, list):
        *parts, part = content
        out["content"] = [*parts, {**part, "text": f"{part['text']}{end}"}]
    else:
        out["content"] = f"{content}{end}"
    if begun.reasoning:
        out |= {key: f"{out[key]}{reasoning_end}" for key in _THINKING_KEYS if key in out}
    return out


def _append_prefill_to_prompt(
    prompt: str, begun: AssistantPrefill, thinking: ThinkingSyntax | None
) -> str:
    """Write a begun answer behind the generation prompt, in the marks of the chat format."""
    if thinking is None:
        return prompt + begun.content
    opening, closing = thinking.marks
    end = prompt.rstrip()
    if begun.content and not begun.reasoning.strip():
        close = thinking.close if end.endswith(opening) else ""
        return f"{prompt}{close}{begun.content}"
    if end.endswith(closing):  # the prompt excludes thinking, which this answer has
        head = end.removesuffix(closing)
        bare = head.rstrip().removesuffix(opening)
        prompt = bare if head.rstrip().endswith(opening) else head
    if not end.endswith(opening):
        prompt += thinking.open
    if not begun.content:
        return prompt + begun.reasoning
    reasoning = begun.reasoning.strip("\n")
    return f"{prompt}{reasoning}{thinking.close}{begun.content}"


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else join_text_parts(content)
