"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr

from modelmill.core.errors import RequestError
from modelmill.core.types import MAX_INT32, TOKEN_IDS_GRAMMAR, Grammar, SamplingParams
from modelmill.serve.compatibility_fields import ChatCompatibilityFields
from modelmill.serve.generation_schema import MAX_TOP_LOGPROBS, NO_TOKEN_LIMIT, GenerationFields
from modelmill.serve.message_cleaning import ChatMessages
from modelmill.serve.strict_models import FAIL_FAST, JsonObject
from modelmill.serve.tool_schema import (
    AllowedToolChoice,
    ChatTools,
    CustomTool,
    CustomToolChoice,
    NamedToolChoice,
)
from modelmill.text.begun_answer import (
    AssistantPrefill,
    check_continued_messages,
    parse_assistant_prefill,
)
from modelmill.text.chat_syntax import ThinkingSyntax
from modelmill.text.tool_grammar import forced_call_grammar

SchemaScope = Literal["", "content", "answer"]
"""What a schema holds where tools may be called: nothing, an answer without calls, any answer."""


def _validate_max_tokens_field(value: int) -> int:
    if value < 1 and value != NO_TOKEN_LIMIT:
        raise ValueError("must be at least 1, or -1 for no limit")
    return value


AnswerLength = Annotated[
    int,
    Field(le=MAX_INT32, json_schema_extra={"minimum": NO_TOKEN_LIMIT}),
    AfterValidator(_validate_max_tokens_field),
]
"""The most tokens of an answer."""


class ChatRequest(GenerationFields, ChatCompatibilityFields):
    """Request body of POST /v1/chat/completions."""

    messages: ChatMessages = Field(min_length=1)
    max_tokens: AnswerLength | None = Field(None, description="-1: no limit")
    max_completion_tokens: AnswerLength | None = Field(None, description="-1: no limit")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: ChatTools | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | NamedToolChoice
        | CustomToolChoice
        | AllowedToolChoice
        | None
    ) = Field(
        None,
        description='"none", "auto", "required", {"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}',
    )
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[str], FAIL_FAST] | None = Field(None, max_length=16)
    reasoning_effort: str | None = None
    # extensions: the prompt ends inside the last message, or without the start of an answer
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: JsonObject | None = Field(
        None, description="variables of the chat template, such as enable_thinking"
    )
    thinking_token_budget: int | None = Field(
        None, ge=0, le=MAX_INT32, description="maximum tokens of the thinking"
    )
    include_reasoning: bool | None = Field(
        None, description="false: the answer has no reasoning_content"
    )

    _schema_scope: SchemaScope = PrivateAttr("")

    @property
    def schema_scope(self) -> SchemaScope:
        """What a schema of the request holds; known once the request has been prepared."""
        return self._schema_scope

    def set_schema_scope(self, scope: SchemaScope) -> None:
        """Set what the schema of the request holds."""
        self._schema_scope = scope

    def check(self) -> None:
        """Raise RequestError for combinations that are not supported."""
        self.check_stream_fields()
        self.check_penalty_field_combinations()
        if self.continue_final_message:
            check_continued_messages(self.messages, self.add_generation_prompt)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true")
        names = [tool.name for tool in self.tools or ()]
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise RequestError("tool_choice needs tools")
        if len(set(names)) < len(names):
            raise RequestError("tools has two functions of the same name")
        chosen = [] if self.tool_choice is None else self._tool_choice_names()
        if not set(chosen) <= set(names):
            raise RequestError("tool_choice names a function that is not among the tools")
        for tool in self.tools or ():
            if isinstance(tool, CustomTool) and tool.custom.format is not None:
                tool.custom.format.check()
        if self.modalities not in (None, ["text"]):
            raise RequestError('modalities must be ["text"]')

    def parse_assistant_prefill(self, thinking: ThinkingSyntax | None) -> AssistantPrefill:
        """Return what the last message has begun; nothing unless ``continue_final_message``.

        Args:
            thinking: marks of the thinking of the chat format.

        Raises:
            RequestError: the message cannot be continued, or its content is begun and the whole
                of it would have to match a grammar.
        """
        if not self.continue_final_message:
            return AssistantPrefill()
        begun = parse_assistant_prefill(self.messages, thinking)
        grammar = self.grammar() if begun.part == "content" else None
        if grammar is not None and grammar.grammar_type != TOKEN_IDS_GRAMMAR:
            field = "tool_choice" if self.forces_tool_call else self.grammar_field
            raise RequestError(
                f"{field} cannot be combined with continue_final_message: the content has begun, "
                "and would match only from its middle on; leave one of them out"
            )
        return begun

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that may be called."""
        if self.tool_choice == "none":
            return []
        allowed = isinstance(self.tool_choice, AllowedToolChoice)
        names = frozenset(self._tool_choice_names() if allowed else ())
        return [
            tool.as_template_tool()
            for tool in self.tools or ()
            if not allowed or tool.name in names
        ]

    @property
    def custom_tool_names(self) -> frozenset[str]:
        """Names of the custom tools."""
        return frozenset(tool.name for tool in self.tools or () if isinstance(tool, CustomTool))

    @property
    def warnings(self) -> list[str]:
        """See ``GenerationFields.warnings``."""
        unenforced = [
            f"tools: the grammar of {tool.name} is part of its description, and not enforced"
            for tool in self.tools or ()
            if isinstance(tool, CustomTool)
            and (tool.has_unenforced_grammar or (tool.grammar and self.continue_final_message))
        ]
        return [*unenforced, *super().warnings]

    def _tool_choice_names(self) -> list[str]:
        """Names of the functions in tool_choice."""
        choice = self.tool_choice
        if isinstance(choice, (NamedToolChoice, CustomToolChoice)):
            return [choice.name]
        if isinstance(choice, AllowedToolChoice):
            return [tool.name for tool in choice.allowed_tools.tools]
        return []

    @property
    def forces_tool_call(self) -> bool:
        """Whether the output must be a tool call."""
        if isinstance(self.tool_choice, AllowedToolChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return bool(self.tools) and self.tool_choice not in (None, "none", "auto")

    def grammar(self) -> Grammar | None:
        """Return the constraint on the output: of a forced call, or as requested.

        Raises:
            RequestError: the fields contradict each other.
        """
        grammar = super().grammar()
        if not self.forces_tool_call:
            return grammar
        if grammar is not None and self.response_format is None:
            raise RequestError(
                f"{super().grammar_field} has no meaning where a call is forced; give one of them"
            )
        if grammar is not None:
            self._warnings[:] = ["response_format: it has no effect where a call is forced"]
        named = isinstance(self.tool_choice, (NamedToolChoice, CustomToolChoice))
        name = self._tool_choice_names()[0] if named else None
        return forced_call_grammar(
            self.offered_tools, name, several=name is None and self.parallel_tool_calls is True
        )

    @property
    def grammar_field(self) -> str:
        """See ``GenerationFields.grammar_field``."""
        return "tools" if self.forces_tool_call else super().grammar_field

    def sampling_params(self) -> SamplingParams:
        """Convert to SamplingParams."""
        limit = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        return self.make_sampling_params(
            max_tokens=self._resolve_max_tokens(limit, None),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )
