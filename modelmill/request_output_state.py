"""Text side of one request: detokenization, stop strings and the growing output."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from modelmill.core.types import FinishReason, Request, TokenOutput
from modelmill.outputs import CompletionOutput, OutputDelta, RequestOutput
from modelmill.text.answer_grammar import PromptThinking
from modelmill.text.answer_history import PromptTail
from modelmill.text.answer_pieces import BegunPart
from modelmill.text.detokenizer import Detokenizer
from modelmill.text.stop_matcher import StopMatcher
from modelmill.text.thinking_budget import is_cut_in_forced_thinking_end
from modelmill.text.thinking_scanner import AnswerThinkingSyntax, ThinkingScanner
from modelmill.text.tokenizer_loader import Tokenizer


class RequestOutputState:
    """Turns the TokenOutputs of one request into text.

    Without a tokenizer (ids-only engine) the text stays empty.
    """

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        shown_special: Collection[int] = (),
        continues_prompt: bool = False,
        prompt_thinking: PromptThinking = "free",
        prompt_tail: PromptTail | None = None,
        begun: BegunPart = "",
        strips_start: bool = False,
        prompt_changes: Sequence[str] = (),
        thinking_syntax: AnswerThinkingSyntax | None = None,
    ) -> None:
        """Start the state of a request that has produced no token yet.

        Args:
            request: The request.
            prompt: Its text, if it has one.
            tokenizer: None for an ids-only engine.
            shown_special: Special tokens to keep in the text, such as the start of a tool call.
            continues_prompt: Whether the output continues the prompt's text (a completion) instead
                of being a separate text (a chat message).
            prompt_thinking: What the prompt says of the thinking.
            prompt_tail: The end of a conversation's prompt, if its answers can be remembered.
            begun: What the prompt has begun of the answer.
            strips_start: Whether whitespace at the start of the output is left out of its text.
            prompt_changes: What was done with the messages so that a chat template takes them.
            thinking_syntax: Where the output may have thinking, in which no stop string counts.
        """
        self._thinking_scope = thinking_syntax
        self.prompt_changes = tuple(prompt_changes)
        self._strips_start = strips_start
        self.request = request
        self.prompt_tail = prompt_tail
        self.begun: BegunPart = begun
        self.prompt_thinking: PromptThinking = prompt_thinking
        self.continues_prompt = continues_prompt
        self.echo_text = ""
        params = request.params
        self.start_time = time.perf_counter()  # output.seconds counts from here
        self._prompt_computed = False
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            skip = params.skip_special_tokens
            self._detokenizer = Detokenizer(
                tokenizer,
                skip_special=skip,
                shown_special=shown_special,
                continues_prompt=continues_prompt,
            )
        self._sequences = self._make_detokenizers()
        outputs = [
            CompletionOutput(i, logprobs=None if params.logprobs is None else [])
            for i in range(params.n)
        ]
        self.output = RequestOutput(request.id, prompt, list(request.prompt), outputs)

    def set_queue_order(self, priority: int, virtual_start: float) -> None:
        """Set when the request starts, before it is queued (``core.types.Request``)."""
        self.request = replace(self.request, priority=priority, virtual_start=virtual_start)

    def _make_detokenizers(self) -> list[SequenceDetokenizer]:
        params, tokens = self.request.params, self._detokenizer
        return [
            SequenceDetokenizer(
                None if tokens is None else tokens.fork(),
                params.stop,
                self._strips_start,
                self._thinking_scope,
            )
            for _ in range(params.n)
        ]

    def make_answer_detokenizer(self) -> Detokenizer | None:
        """A detokenizer at the beginning of an answer; None for an ids-only engine."""
        return None if self._detokenizer is None else self._detokenizer.fork()

    def is_cut_in_forced_thinking_end(self, ids: Sequence[int]) -> bool:
        """Whether an answer was cut inside the mark that a budget of thinking forced."""
        return self._tokenizer is not None and is_cut_in_forced_thinking_end(
            self._tokenizer, self.request.grammar, ids
        )

    def set_echo_text(self) -> None:
        """Set ``echo_text`` to the prompt's text. Call it once, before any ``process``.

        If the ids end within a character, that character is not in ``echo_text``: the completions'
        texts start with it.
        """
        if self.output.prompt is not None or self._detokenizer is None:
            self.echo_text = self.output.prompt or ""
            return
        self.echo_text = "".join(map(self._detokenizer.push_prompt_token, self.request.prompt))
        self._sequences = self._make_detokenizers()

    @property
    def is_prompt_computed(self) -> bool:
        """Whether it is known how many of the prompt's tokens came from the prefix cache."""
        return self._prompt_computed

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, 0 until it is computed, so that usage counts it once."""
        return len(self.output.prompt_token_ids) if self._prompt_computed else 0

    def token_counts(self, index: int) -> tuple[int, int, int]:
        """Tokens so far: (prompt, completion ``index``, prompt tokens from the prefix cache)."""
        return (
            self.prompt_tokens,
            len(self.output.outputs[index].token_ids),
            self.output.cached_tokens,
        )

    def process_token_output(self, token: TokenOutput) -> tuple[OutputDelta, bool]:
        """Process one TokenOutput of the engine core.

        Returns:
            The delta, and whether a stop string ended that sequence just now: the engine core does
            not know text, so the caller must then call ``EngineCore.finish_on_stop_string``.
        """
        now = time.perf_counter() - self.start_time
        result, detokenizer = self.output, self._sequences[token.index]
        output = result.outputs[token.index]
        self._prompt_computed = (
            self._prompt_computed or token.finish_reason is not FinishReason.ABORT
        )
        if token.prompt_logprobs is not None:
            result.prompt_logprobs = token.prompt_logprobs
        if token.embedding is not None:
            result.embedding = token.embedding
        result.cached_tokens = max(result.cached_tokens, token.cached_tokens)
        if output.finish_reason is not None:
            return OutputDelta(token.index, "", (), output.finish_reason, result), False
        ids = (
            token.replayed_ids
            if token.replayed_ids is not None
            else (() if token.token_id is None else (token.token_id,))
        )
        if ids and result.first_token_seconds is None:
            result.first_token_seconds = now
        text, stopped = "", False
        for id in ids:
            output.token_ids.append(id)
            piece, stopped = detokenizer.push(
                id, check_stops=len(output.token_ids) > (self.request.params.min_tokens or 0)
            )
            text += piece
            if stopped:
                break
        if token.logprobs is not None and output.logprobs is not None:
            output.logprobs.append(token.logprobs)
        if token.score is not None:
            output.score = token.score
        text += self._finish_sequence(output, detokenizer, token, stopped)
        output.text += text
        if result.finished:
            result.seconds = now
        return OutputDelta(
            token.index, text, tuple(ids), output.finish_reason, result
        ), stopped and token.finish_reason is None

    def _finish_sequence(
        self,
        output: CompletionOutput,
        detokenizer: SequenceDetokenizer,
        token: TokenOutput,
        stopped: bool,
    ) -> str:
        """Set the finish of a sequence; return the text that was buffered until now."""
        if stopped:
            output.finish_reason, output.stop_reason = FinishReason.STOP.value, detokenizer.matched
            return (detokenizer.matched or "") if self.request.params.include_stop else ""
        if token.finish_reason is None:
            return ""
        output.finish_reason = token.finish_reason.value
        if token.stop_token_id is not None:
            output.stop_reason = token.stop_token_id
            if token.token_id is None:
                output.token_ids.append(token.stop_token_id)
        return detokenizer.flush()


class SequenceDetokenizer:
    """Incremental detokenization and stop strings of one sequence."""

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stops: Sequence[str],
        strips_start: bool = False,
        thinking_syntax: AnswerThinkingSyntax | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._strips_start = strips_start
        self._stops = StopMatcher(stops) if stops else None
        self._thinking = None if thinking_syntax is None else ThinkingScanner(thinking_syntax)
        self.matched: str | None = None

    def push(self, id: int, check_stops: bool) -> tuple[str, bool]:
        """Add one id.

        Args:
            id: The token.
            check_stops: False while ``min_tokens`` is not reached: stop strings are ignored.

        Returns:
            The text that is final now, and whether a stop string ended the sequence.
        """
        if self._detokenizer is None:
            return "", False
        text = self._strip_start(self._detokenizer.push(id))
        return self._match_stop_strings(text, check_stops)

    def flush(self) -> str:
        """Return the buffered text at the end of the sequence."""
        if self._detokenizer is None:
            return ""
        text, stopped = self._match_stop_strings(self._strip_start(self._detokenizer.flush()))
        if self._stops is None or stopped:
            return text
        if self._thinking is not None:
            text += self._match_stops_outside_thinking(self._thinking.flush())[0]
        return text + self._stops.flush()

    def _strip_start(self, text: str) -> str:
        """Leave out whitespace as long as there was nothing else, if the sequence is to be so."""
        if not self._strips_start:
            return text
        text = text.lstrip()
        self._strips_start = not text
        return text

    def _match_stop_strings(self, text: str, check_stops: bool = True) -> tuple[str, bool]:
        if self._stops is None:
            return text, False
        spans = [(text, False)] if self._thinking is None else self._thinking.push(text)
        return self._match_stops_outside_thinking(spans, check_stops)

    def _match_stops_outside_thinking(
        self, spans: Sequence[tuple[str, bool]], check_stops: bool = True
    ) -> tuple[str, bool]:
        """Return the final text of texts that may be thinking, and whether a stop string came."""
        assert self._stops is not None
        out = ""
        for text, thinks in spans:
            if thinks or not check_stops:
                out += self._stops.flush() + text
                continue
            emit, stopped, matched = self._stops.push(text)
            out += emit
            if stopped:
                self.matched = matched
                return out, True
        return out, False
