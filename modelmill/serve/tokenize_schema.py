"""Bodies of POST /tokenize, /detokenize and /apply-template."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from modelmill.serve.catalogue.keep_alive import KeepAliveField
from modelmill.serve.compatibility_fields import EchoOffField, VllmFields
from modelmill.serve.message_cleaning import ChatMessages
from modelmill.serve.prompt_fields import TokenIds
from modelmill.serve.strict_models import FAIL_FAST, JsonObject, ModelName, Text
from modelmill.serve.tool_schema import MAX_TOOLS, Tool
from modelmill.text.begun_answer import check_continued_messages


class ApplyTemplateRequest(VllmFields, EchoOffField):
    """POST /apply-template: the prompt of a conversation as text."""

    may_omit_model: ClassVar[bool] = True

    model: ModelName = ""
    keep_alive: KeepAliveField = None
    messages: ChatMessages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="the prompt ends inside the last message"
    )
    tools: Annotated[list[Tool], FAIL_FAST] | None = Field(None, max_length=MAX_TOOLS)
    chat_template_kwargs: JsonObject | None = None

    def check_continue_final_message(self) -> None:
        """Raise RequestError if the messages cannot be continued."""
        if self.continue_final_message:
            check_continued_messages(self.messages or (), self.add_generation_prompt)

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the template writes."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]


class TokenizeRequest(ApplyTemplateRequest):
    """POST /tokenize: a prompt, or messages through the chat template.

    content, add_special, parse_special and with_pieces are llama.cpp's names.
    """

    prompt: Text | None = None
    content: Text | None = Field(None, description="as prompt, without BOS unless add_special")
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = Field(
        None, description="control tokens in the text become their ids"
    )
    return_token_strs: bool | None = None
    with_pieces: bool | None = Field(None, description="tokens as objects with id and piece")

    @property
    def text(self) -> str | None:
        """The text to tokenize."""
        return self.prompt if self.content is None else self.content

    @property
    def adds_special_tokens(self) -> bool:
        """Whether BOS comes first: by default for a prompt, not for llama.cpp's content."""
        choice = self.add_special_tokens if self.add_special is None else self.add_special
        return self.content is None if choice is None else choice


class DetokenizeRequest(VllmFields):
    """Request body of POST /detokenize."""

    may_omit_model: ClassVar[bool] = True

    model: ModelName = ""
    keep_alive: KeepAliveField = None
    tokens: TokenIds
