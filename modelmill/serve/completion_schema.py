"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from modelmill.core.errors import RequestError
from modelmill.core.types import MAX_COMPLETIONS_PER_PROMPT, MAX_INT32, SamplingParams
from modelmill.serve.generation_schema import MAX_TOP_LOGPROBS, NO_TOKEN_LIMIT, GenerationFields
from modelmill.serve.mixed_prompts import MixedPrompt, MixedPrompts, split_mixed_prompts
from modelmill.serve.prompt_fields import (
    MAX_PROMPTS,
    PromptTokenIds,
    TextList,
    TokenIdLists,
    list_prompts,
)
from modelmill.serve.sampling_schema import UnlimitedTemperature
from modelmill.serve.strict_models import Text


class CompletionRequest(GenerationFields):
    """Request body of POST /v1/completions."""

    prompt: Text | TextList | PromptTokenIds | TokenIdLists = Field(
        description="a string, a list of strings, token ids, or lists of them"
    )
    max_tokens: int | None = Field(16, ge=NO_TOKEN_LIMIT, le=MAX_INT32, description="-1: no limit")
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_COMPLETIONS_PER_PROMPT)
    suffix: Text | None = Field(None, description="fill in the text between prompt and suffix")
    parse_special: bool | None = Field(
        None, description="control tokens in the prompt's text become their ids"
    )
    add_special_tokens: bool | None = Field(None, description="false: no BOS before the prompt")

    def prompts(self) -> Sequence[MixedPrompt]:
        """The prompts as a list.

        Raises:
            RequestError: a prompt is empty, or there are too many.
        """
        return list_prompts(self.prompt, "prompt", "prompts", MAX_PROMPTS)

    @property
    def infill_suffix(self) -> str | None:
        """The text after what is filled in; None: the prompt is continued, as for an empty one."""
        return self.suffix or None

    def check(self) -> None:
        """Raise RequestError for combinations that are not supported."""
        self.check_stream_fields()
        self.check_penalty_field_combinations()
        if self.infill_suffix is not None and (
            self.echo or not all(isinstance(each, str) for each in self.prompts())
        ):
            raise RequestError("suffix needs a prompt of text, and has no echo")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of must equal n: answers are not ranked")

    def sampling_params(self) -> SamplingParams:
        """Convert to SamplingParams."""
        prompt_logprobs = self.logprobs if self.echo else self.prompt_logprobs
        return self.make_sampling_params(
            max_tokens=self._resolve_max_tokens(self.max_tokens, 16),
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class MixedCompletionRequest(UnlimitedTemperature, CompletionRequest):
    """A completion of prompts as llama.cpp takes them."""

    prompt: Text | MixedPrompts  # type: ignore[assignment]

    @property
    def infill_suffix(self) -> str | None:
        """As it is: of /infill, which fills in a text that nothing follows, too."""
        return self.suffix

    def prompts(self) -> Sequence[MixedPrompt]:
        """See ``CompletionRequest.prompts``."""
        return split_mixed_prompts(self.prompt)
