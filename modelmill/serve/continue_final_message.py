"""The last message of a conversation as the beginning of the answer (continue_final_message)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.serve.chat_schema import ChatRequest
from modelmill.text.message_validation import join_text_parts, validate_messages


def split_answer_start(body: ChatRequest) -> tuple[Sequence[Mapping[str, Any]], str | None]:
    """Split a conversation into the messages before the answer, and the text that begins it.

    The prompt is that of the messages before, with the template's start of an answer, followed by
    the tokens of the text: as if the model had written it.

    Returns:
        The messages, and None for a request that does not continue its last message.

    Raises:
        RequestError: the last message is invalid, or the only one.
    """
    if not body.continue_final_message:
        return body.messages, None
    *history, last = body.messages
    if not history:
        raise RequestError("continue_final_message needs a message before the last one")
    try:
        message = validate_messages([last], as_sent=True)[0]
    except RequestError as error:
        text = str(error).replace("messages[0]", f"messages[{len(history)}]", 1)
        raise RequestError(text) from None
    content = message["content"]
    return history, content if isinstance(content, str) else join_text_parts(content)
