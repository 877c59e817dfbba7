"""POST /v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request

from modelmill.core.errors import RequestError
from modelmill.outputs import CompletionOutput, OutputDelta
from modelmill.request_output_state import RequestOutputState
from modelmill.serve import openai_format
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.call_constraint import constrain_optional_tool_calls
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.custom_tools import ToolCallDeltaFormatter, tool_call_json
from modelmill.serve.engine_client import EngineClient, max_tokenize_tokens
from modelmill.serve.image_fields import ImageFields, rename_image_in_error
from modelmill.serve.openai_format import ChatLogprobsFormatter, sse_event
from modelmill.serve.reasoning_tokens import ReasoningTokenCounter, count_reasoning_tokens
from modelmill.serve.request_handle import HttpRequestHandle, PromptOutputDelta
from modelmill.serve.request_options import (
    cache_salt_or_random,
    format_prompt_logprobs,
    prompt_truncation,
    sampling_params_with_bad_words,
)
from modelmill.serve.routes.common import (
    acquire_service_and_engine,
    check_message_sizes,
    prepare_and_submit_requests,
    random_id,
)
from modelmill.serve.stream import EventFormatter, EventStream, wait_or_disconnect
from modelmill.serve.timings import request_timings, timing_and_warning_fields
from modelmill.serve.tool_call_progress import ToolCallProgress
from modelmill.serve.tool_image_placeholders import replace_tool_images_with_text
from modelmill.serve.tool_schema import Tool, check_parameter_schemas_are_json
from modelmill.text import tool_prompts
from modelmill.text.answer_parser import AnswerParser
from modelmill.text.answer_pieces import (
    AnswerPiece,
    ReasoningDelta,
    ToolCallDelta,
    collect_answer,
    collect_content_and_calls,
)
from modelmill.text.chat_format_loader import make_chat_answer_parser
from modelmill.text.chat_format_registry import load_chat_syntax
from modelmill.text.thinking_switch import ENABLE_THINKING_VARIABLE, THINKING_VARIABLE
from modelmill.text_processor import TextProcessor

BodyT = TypeVar("BodyT")

router = APIRouter(route_class=BodyRoute)
CONTINUE_FINAL_MESSAGE_WORDING = "a last message of the assistant"
"""What other APIs send in the place of continue_final_message."""


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Any:
    """Answer a conversation through the engine's chat template."""
    service, engine = await acquire_service_and_engine(request, body.model, body.keep_alive)
    body.check()
    engine.check_capacity(body.n or 1)
    _, handle = await prepare_and_submit_requests(
        request,
        engine,
        chat_request_state,
        body,
        engine.request_limits.max_len,
        get_states=lambda one: [one],
    )
    builder = ChatResponseBuilder(body, handle, engine.text_processor)
    if body.stream:
        return EventStream(handle, builder)
    await wait_or_disconnect(request, handle)
    return await service.run_in_thread(
        lambda: openai_format.SurrogateSafeJsonResponse(builder.full_response())
    )


async def submit_converted_chat(
    request: Request,
    engine: EngineClient,
    prepare: Callable[[TextProcessor, BodyT, int], tuple[ChatRequest, RequestOutputState]],
    body: BodyT,
) -> tuple[ChatRequest, HttpRequestHandle]:
    """Queue the conversation that a request of another API stands for.

    Args:
        request: the HTTP request.
        engine: to queue at.
        prepare: makes a chat request and a request of the engine from the body and the tokens that
            the engine takes.
        body: of that API.
    """
    (chat, _), handle = await prepare_and_submit_requests(
        request,
        engine,
        prepare,
        body,
        engine.request_limits.max_len,
        get_states=lambda prepared: [prepared[1]],
    )
    return chat, handle


def converted_chat_request_state(
    text_processor: TextProcessor,
    chat: ChatRequest,
    max_model_len: int,
    rename_fields: Callable[[str], str],
    image_fields: ImageFields,
) -> RequestOutputState:
    """Check a conversation of another API, and convert it to a request of an engine.

    Args:
        text_processor: of the engine.
        chat: the conversation.
        max_model_len: tokens that the engine takes.
        rename_fields: turns an error or a warning about the chat request into one about that API's
            fields.
        image_fields: of that API's request.

    Raises:
        RequestError: the request is invalid.
    """

    def rename(text: str) -> str:
        image_error = rename_image_in_error(text, chat.messages, image_fields)
        if image_error is not None:
            return image_error
        return rename_fields(text).replace("continue_final_message", CONTINUE_FINAL_MESSAGE_WORDING)

    try:
        chat.check()
        state = chat_request_state(text_processor, chat, max_model_len)
    except RequestError as error:
        raise error.reworded(rename(str(error))) from None
    chat.rename_warning_fields(rename)
    return state


def chat_request_state(
    text_processor: TextProcessor, body: ChatRequest, max_model_len: int
) -> RequestOutputState:
    """Convert the conversation to a request of an engine.

    Args:
        text_processor: of the engine.
        body: the HTTP request.
        max_model_len: tokens that the engine takes.

    Raises:
        RequestError: the request is invalid.
    """
    if text_processor.chat_format is None:
        raise RequestError("this engine has no chat template for messages; use /v1/completions")
    check_parameter_schemas_are_json(
        tool.function for tool in body.tools or () if isinstance(tool, Tool)
    )
    truncation = prompt_truncation(body, max_model_len)
    longest = max_model_len if truncation is None else max_tokenize_tokens(max_model_len)
    check_message_sizes(text_processor, body.messages, longest, body.offered_tools)
    sent: Sequence[Mapping[str, Any]] = body.messages
    if not text_processor.supports_images:
        sent, replaced = replace_tool_images_with_text(sent)
        body.add_warnings(replaced)
    grammar = body.relax_and_validate_grammar()
    template_kwargs = _template_kwargs(text_processor, body)
    text_processor = text_processor.variant_for_template_kwargs(template_kwargs)
    assert text_processor.chat_format is not None, "a variable changes the format, and removes none"
    format_name = text_processor.chat_format.format_name
    offered = body.offered_tools
    params = sampling_params_with_bad_words(text_processor, body)
    begun = body.parse_assistant_prefill(text_processor.chat_format.thinking)
    messages, template = tool_prompts.prepare_tool_conversation(
        format_name, sent, offered, writes_calls=text_processor.chat_format.writes_calls
    )
    if offered:
        params = tool_prompts.add_call_stop_strings(params, format_name)
    if begun.part != "content":
        grammar = constrain_optional_tool_calls(body, grammar, format_name)
    if template_kwargs:
        template["options"] = template_kwargs
    state = text_processor.chat_request(
        messages,
        params,
        cache_salt=cache_salt_or_random(body),
        grammar=grammar,
        calls=bool(offered),
        parses_thinking=True,
        thinking_budget=body.thinking_token_budget,
        add_generation_prompt=body.add_generation_prompt is not False,
        continues=bool(body.continue_final_message),
        truncation=truncation,
        tool_schemas=tool_prompts.tool_schemas(offered),
        sent_messages=body.messages[:-1] if body.continue_final_message else body.messages,
        **template,
    )
    body.add_warnings(state.prompt_changes)
    return state


def _template_kwargs(text_processor: TextProcessor, body: ChatRequest) -> dict[str, Any]:
    """The template's variables: those of the request, and what its effort of reasoning means."""
    template_kwargs = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    chat_format = text_processor.chat_format
    if effort is None or chat_format is None:
        return template_kwargs
    if chat_format.reads_reasoning_effort:
        template_kwargs.setdefault("reasoning_effort", effort)
    switches = effort == "none" or not chat_format.reads_reasoning_effort
    if switches and chat_format.thinking is not None and THINKING_VARIABLE not in template_kwargs:
        template_kwargs.setdefault(ENABLE_THINKING_VARIABLE, effort != "none")
    return template_kwargs


def make_request_answer_parser(
    body: ChatRequest, text_processor: TextProcessor, state: RequestOutputState | None = None
) -> AnswerParser | None:
    """Make the parser of an output; None if it has neither tools nor thinking.

    Args:
        body: the HTTP request.
        text_processor: of the engine.
        state: the engine's request, which knows whether the prompt began the thinking.
    """
    return make_chat_answer_parser(
        text_processor.chat_format,
        tool_prompts.tool_schemas([] if body.schema_scope == "answer" else body.offered_tools),
        thinks=state is not None and state.prompt_thinking == "open",
        continues=body.messages[-1].get("role") == "tool",
        max_calls=1 if body.parallel_tool_calls is False else None,
        forced=body.forces_tool_call,
        begun="" if state is None else state.begun,
        schema=body.schema_scope == "content",
        options=_template_kwargs(text_processor, body),
    )


def is_cut_by_length_or_stop(output: CompletionOutput, call_stops: Collection[str]) -> bool:
    """Whether a finished output was cut: by its length limit or a stop string.

    Those of ``call_stops``, with which the format ends calls, cut nothing.
    """
    stopped = isinstance(output.stop_reason, str) and output.stop_reason not in call_stops
    return output.finish_reason != "stop" or stopped


class AnswerRecordingParser:
    """Splits the text of one choice into pieces, and has the whole answer remembered.

    Attributes:
        parser: None if the output has neither tools nor thinking.
    """

    def __init__(
        self, body: ChatRequest, text_processor: TextProcessor, state: RequestOutputState
    ) -> None:
        """Start one choice; state: the engine's request, which knows how the prompt ends."""
        self.parser = make_request_answer_parser(body, text_processor, state)
        self._counter = None if self.parser is None else ReasoningTokenCounter(self.parser)
        self._make_parser = functools.partial(
            make_request_answer_parser, body, text_processor, state
        )
        self._num_whole_reasoning_tokens = 0
        self._text_processor, self._state = text_processor, state
        chat_format = text_processor.chat_format
        self._call_stops = (
            () if chat_format is None else load_chat_syntax(chat_format.format_name).calls.stops
        )
        self._pieces: list[AnswerPiece] = []

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thinking so far."""
        counted = 0 if self._counter is None else self._counter.count
        return counted + self._num_whole_reasoning_tokens

    def parse_whole_text(self, output: CompletionOutput) -> list[AnswerPiece]:
        """Return the pieces of a whole answer, in order."""
        pieces = self.parse_text(output.text, output, 0)
        num_thoughts = 0 if self.parser is None else self.parser.num_thoughts
        parser = self._make_parser() if num_thoughts else None
        if parser is not None:
            # the token that ended the answer is not part of its text
            ids = output.token_ids[: len(output.token_ids) - isinstance(output.stop_reason, int)]
            self._num_whole_reasoning_tokens = count_reasoning_tokens(
                pieces, num_thoughts, ids, parser, self._state.make_answer_detokenizer()
            )
        return pieces

    def parse_text(
        self, text: str, ended: CompletionOutput | None, num_tokens: int
    ) -> list[AnswerPiece]:
        """Return the pieces of new text, in order.

        Args:
            text: to add.
            ended: the output, if this is its last text.
            num_tokens: of the text.
        """
        pieces: list[AnswerPiece] = [text] if text else []
        if self.parser is not None and self._counter is not None:
            pieces = self._counter.push(text, num_tokens)
            if ended is not None:
                pieces += self._flush_parser(self.parser, ended)
        self._pieces += pieces
        if ended is not None and not isinstance(ended.stop_reason, str):
            answer = collect_answer(self._pieces)
            self._text_processor.remember_answer(self._state, ended.token_ids, answer)
        return pieces

    def _flush_parser(self, parser: AnswerParser, ended: CompletionOutput) -> list[AnswerPiece]:
        cut = is_cut_by_length_or_stop(ended, self._call_stops)
        forced = (
            cut
            and parser.in_reasoning
            and self._state.is_cut_in_forced_thinking_end(ended.token_ids)
        )
        return parser.flush(cut, forced_mark=forced)


class ChatResponseBuilder(EventFormatter):
    """Builds the response, whole or as events."""

    def __init__(
        self, body: ChatRequest, handle: HttpRequestHandle, text_processor: TextProcessor
    ) -> None:
        self._body, self._handle = body, handle
        self._head = {
            "id": random_id("chatcmpl"),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": text_processor.system_fingerprint,
        }
        self._tokenizer = text_processor.tokenizer
        self._n = body.n or 1
        self._logprobs = [
            ChatLogprobsFormatter(
                text_processor.tokenizer,
                body.top_logprobs or 0,
                as_ids=bool(body.return_tokens_as_token_ids),
            )
            for _ in range(self._n)
        ]
        state = handle.request_states[0]
        self._readers = [AnswerRecordingParser(body, text_processor, state) for _ in range(self._n)]
        self._calls = [ToolCallProgress(body, text_processor) for _ in range(self._n)]
        self._num_sent_ids = [0] * self._n
        self._call_deltas = [ToolCallDeltaFormatter(body.custom_tool_names) for _ in range(self._n)]
        self._tail: dict[str, Any] = {"usage": None} if body.wants_usage else {}
        self._chunk_template = openai_format.ChunkTemplate(self._head, self._tail)

    def _split_pieces(
        self, index: int, pieces: Sequence[AnswerPiece]
    ) -> tuple[str, str, list[ToolCallDelta]]:
        """Split new pieces of a choice into (content, thinking, deltas of tool calls)."""
        calls = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
        for call in calls:
            self._calls[index].add_delta(call)
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        if self._body.include_reasoning is False:
            return content, "", calls
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningDelta))
        return content, reasoning, calls

    def full_response(self) -> dict[str, Any]:
        """Return the response body of a request without streaming."""
        result = self._handle.request_states[0].output
        response: dict[str, Any] = {
            **self._head,
            "choices": [self._format_choice(output) for output in result.outputs],
            "usage": self._usage(),
            # null rather than left out, as in vLLM: its clients read them without being asked
            "prompt_token_ids": None,
            "prompt_logprobs": None,
        }
        if self._body.return_token_ids:
            response["prompt_token_ids"] = result.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            state = self._handle.request_states[0]
            response["prompt_logprobs"] = format_prompt_logprobs(self._tokenizer, state)
        return {**response, **timing_and_warning_fields(self._body, self._handle.request_states)}

    def _running_usage_and_timings(self) -> dict[str, Any]:
        """Keys of every event of a stream, where the client wants to follow its progress."""
        states, out = self._handle.request_states, dict[str, Any]()
        if self._body.wants_running_usage:
            out["usage"] = self._usage()
        if self._body.timings_per_token and states[0].is_prompt_computed:
            out["timings"] = request_timings(states)
        return out

    def _format_choice(self, output: CompletionOutput) -> dict[str, Any]:
        # the stop token is not part of the text
        count = len(output.token_ids) - isinstance(output.stop_reason, int)
        pieces = self._readers[output.index].parse_whole_text(output)
        content, reasoning, calls = self._split_pieces(output.index, pieces)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= _reasoning_fields(reasoning)
        if calls:
            message["content"] = content or None
            custom_tool_names = self._body.custom_tool_names
            message["tool_calls"] = [
                tool_call_json(call, custom_tool_names)
                for call in collect_content_and_calls(calls)[1]
            ]
        return {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs[output.index].format_next(output, count),
            "finish_reason": self._calls[output.index].finish_reason(output, output.finish_reason),
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if self._body.return_token_ids else None,
        }

    def first_events(self) -> bytes:
        """The event with the role, for every choice."""
        role = {"role": "assistant", "content": "", "refusal": None}
        prompt = self._handle.request_states[0].output.prompt_token_ids
        fields: dict[str, Any] = {"prompt_token_ids": prompt} if self._body.return_token_ids else {}
        if self._body.warnings:
            fields["warnings"] = self._body.warnings
        return b"".join(
            self._format_event(index, role, None, None, event_fields=fields)
            for index in range(self._n)
        )

    def delta_events(self, items: Sequence[PromptOutputDelta]) -> bytes:
        """An event for each delta that has content."""
        return b"".join(self._delta_event(each.delta) for each in items)

    def _delta_event(self, delta: OutputDelta) -> bytes:
        output = delta.output.outputs[delta.index]
        logprobs = self._logprobs[delta.index].format_next(output, len(delta.token_ids))
        ids = self._new_token_ids(output, delta) if self._body.return_token_ids else None
        ended = None if delta.finish_reason is None else output
        pieces = self._readers[delta.index].parse_text(delta.text, ended, len(delta.token_ids))
        text, reasoning, calls = self._split_pieces(delta.index, pieces)
        has_text = text or reasoning or calls
        if not (has_text or (logprobs and logprobs["content"]) or delta.finish_reason or ids):
            return b""
        content: dict[str, Any] = (
            {"content": text} if text or not (delta.finish_reason or calls or reasoning) else {}
        )
        content |= _reasoning_fields(reasoning)
        call_deltas = self._call_deltas[delta.index].format(
            calls, ended=delta.finish_reason is not None
        )
        if call_deltas:
            content["tool_calls"] = call_deltas
        choice_fields: dict[str, Any] = {} if ids is None else {"token_ids": ids}
        if delta.finish_reason:
            choice_fields["stop_reason"] = output.stop_reason
        return self._format_event(
            delta.index,
            content,
            logprobs,
            self._calls[output.index].finish_reason(output, delta.finish_reason),
            choice_fields,
        )

    def _new_token_ids(self, output: CompletionOutput, delta: OutputDelta) -> list[int]:
        """Ids that a delta adds; the last delta includes the stop token, which has no text."""
        begin = self._num_sent_ids[output.index]
        end = len(output.token_ids) if delta.finish_reason else begin + len(delta.token_ids)
        self._num_sent_ids[output.index] = end
        return output.token_ids[begin:end]

    def _format_event(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish: str | None,
        choice_fields: dict[str, Any] | None = None,
        event_fields: dict[str, Any] | None = None,
    ) -> bytes:
        """Format one event.

        Args:
            index: of the choice.
            delta: of the choice.
            logprobs: of the choice.
            finish: finish_reason of the choice.
            choice_fields: more keys of the choice.
            event_fields: more keys of the event.
        """
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
            **(choice_fields or {}),
        }
        progress = self._running_usage_and_timings()
        if not (event_fields or progress):
            return self._chunk_template.render_chunk(choice)
        fields = {**(event_fields or {}), **self._tail, **progress}
        return sse_event({**self._head, "choices": [choice], **fields})

    def terminal_events(self) -> bytes:
        """The usage if requested, and the end of the stream."""
        usage = self._usage() if self._body.wants_usage else None
        return openai_format.format_stream_end(self._head, usage)

    def _usage(self) -> dict[str, Any]:
        """The token counts so far."""
        thinking = sum(reader.reasoning_tokens for reader in self._readers)
        usage = openai_format.running_token_usage(self._handle.request_states)
        return {**usage, "completion_tokens_details": {"reasoning_tokens": thinking}}


def _reasoning_fields(reasoning: str) -> dict[str, str]:
    """The thinking under both of its usual names; none if there is none."""
    return {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}
