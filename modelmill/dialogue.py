"""Between ids and text for one request: detokenization, stop strings, and the answer as it grows."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from modelmill.answer import Answer, Completion, Delta
from modelmill.core.types import Finish, Request, Token
from modelmill.text.stop import StopMatcher
from modelmill.text.stream import Detokenizer
from modelmill.text.tokenizer import Tokenizer


class Dialogue:
    """Turns the Tokens of one request into text. An ids-only engine has no tokenizer: its text stays empty."""

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        kept: Collection[int] = (),
        follows: bool = False,
    ) -> None:
        """kept: special tokens that the text shows, since they tell something (that a call begins).

        follows: the answer goes on with the prompt's text (a completion); else it is a text of its own (a chat's).
        """
        self.request, self.follows, self.echoed = request, follows, ""
        params = request.params
        self.started = time.perf_counter()  # answer.seconds are counted from here
        self._begun = False
        self._tokens: Detokenizer | None = None
        if tokenizer is not None:
            skip = params.skip_special_tokens
            self._tokens = Detokenizer(tokenizer, skip_special=skip, kept=kept, follows=follows)
        self._voices = self._spoken()
        outputs = [Completion(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        self.answer = Answer(request.id, prompt, list(request.prompt), outputs)

    def _spoken(self) -> list[_Voice]:
        params, tokens = self.request.params, self._tokens
        return [_Voice(None if tokens is None else tokens.fork(), params.stop) for _ in range(params.n)]

    def echo(self) -> None:
        """The prompt's text (``echoed``) will be shown before the answers'; to be called once, before any ``push``.

        Where ids leave a character unfinished, it is not in there: the answers' texts begin with what becomes of it.
        """
        if self.answer.prompt is not None or self._tokens is None:
            self.echoed = self.answer.prompt or ""
            return
        self.echoed = "".join(map(self._tokens.before, self.request.prompt))
        self._voices = self._spoken()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, once it was computed; who counts what was asked for counts it then, and once."""
        return len(self.answer.prompt_token_ids) if self._begun else 0

    def counts(self, index: int) -> tuple[int, int, int]:
        """Tokens so far: of the prompt, of the answer ``index``, and of the prompt from the prefix cache."""
        return self.prompt_tokens, len(self.answer.outputs[index].token_ids), self.answer.cached_tokens

    def push(self, token: Token) -> tuple[Delta, bool]:
        """Take one piece of news. Returns what it adds and whether a stop string ended that sequence just now."""
        now = time.perf_counter() - self.started
        answer, voice = self.answer, self._voices[token.index]
        output = answer.outputs[token.index]
        self._begun = self._begun or token.finish is not Finish.ABORT
        if token.prompt_logprobs is not None:
            answer.prompt_logprobs = token.prompt_logprobs
        if token.embedding is not None:
            answer.embedding = token.embedding
        answer.cached_tokens = max(answer.cached_tokens, token.cached_tokens)
        if output.finish_reason is not None:
            return Delta(token.index, "", (), output.finish_reason, answer), False
        ids = token.replay if token.replay is not None else (() if token.id is None else (token.id,))
        if ids and answer.first_token_seconds is None:
            answer.first_token_seconds = now
        text, stopped = "", False
        for id in ids:
            output.token_ids.append(id)
            piece, stopped = voice.push(id, watched=len(output.token_ids) > (self.request.params.min_tokens or 0))
            text += piece
            if stopped:
                break
        if token.logprobs is not None and output.logprobs is not None:
            output.logprobs.append(token.logprobs)
        if token.score is not None:
            output.score = token.score
        text += self._end(output, voice, token, stopped)
        output.text += text
        if answer.finished:
            answer.seconds = now
        return Delta(token.index, text, tuple(ids), output.finish_reason, answer), stopped and token.finish is None

    def _end(self, output: Completion, voice: _Voice, token: Token, stopped: bool) -> str:
        """Set the finish of a sequence; returns the text that was held back until now."""
        if stopped:
            output.finish_reason, output.stop_reason = Finish.STOP.value, voice.matched
            return (voice.matched or "") if self.request.params.include_stop else ""
        if token.finish is None:
            return ""
        output.finish_reason = token.finish.value
        if token.stop is not None:
            output.stop_reason = token.stop
            if token.id is None:
                output.token_ids.append(token.stop)
        return voice.flush()


class _Voice:
    """One sequence's way from ids to text."""

    def __init__(self, tokens: Detokenizer | None, stops: Sequence[str]) -> None:
        self._tokens = tokens
        self._stops = StopMatcher(stops) if stops else None
        self.matched: str | None = None

    def push(self, id: int, watched: bool) -> tuple[str, bool]:
        """(text to give out, whether a stop string ended it). watched: whether stop strings count yet (min_tokens)."""
        if self._tokens is None:
            return "", False
        text = self._tokens.push(id)
        return self._match(text) if watched else (text, False)

    def flush(self) -> str:
        if self._tokens is None:
            return ""
        text, stopped = self._match(self._tokens.flush())
        return text if stopped or self._stops is None else text + self._stops.flush()

    def _match(self, text: str) -> tuple[str, bool]:
        if self._stops is None:
            return text, False
        emit, stopped, matched = self._stops.push(text)
        if stopped:
            self.matched = matched
        return emit, stopped
