"""Bodies of llama.cpp's own completion routes, /completion and /infill."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Annotated, Any

from pydantic import Field

from modelmill.core.errors import RequestError
from modelmill.serve.compatibility_fields import (
    AnyItems,
    ignored_field,
    off_only_field,
    only_off_values,
)
from modelmill.serve.completion_schema import CompletionRequest, MixedCompletionRequest
from modelmill.serve.discriminated_unions import make_converted_request, parse_object
from modelmill.serve.generation_schema import MAX_TOP_LOGPROBS, NO_TOKEN_LIMIT, GenerationFields
from modelmill.serve.mixed_prompts import (
    MixedPrompt,
    MixedPrompts,
    has_text,
    split_mixed_prompts,
)
from modelmill.serve.prompt_fields import TextList
from modelmill.serve.sampling_schema import UnlimitedTemperature
from modelmill.serve.strict_models import FAIL_FAST, JsonObjectList, StrictModel, Text

_INFILL_NAMES = {"prompt": "input_prefix", "suffix": "input_suffix"}
_COMPLETION_FIELD_AT_START = re.compile(r"\A(?:prompt|suffix)\b")


class LlamaCppFields(UnlimitedTemperature, GenerationFields):
    """Fields of /completion and /infill."""

    samplers: AnyItems | str | None = ignored_field(
        "the order is fixed: penalties, temperature, filters"
    )
    response_fields: TextList | None = Field(
        None, description="paths of the fields to return, as timings/prompt_n"
    )
    t_max_prompt_ms: int | None = ignored_field("a prompt is always read whole")
    t_max_predict_ms: int | None = ignored_field("n_predict limits the text")
    n_indent: int | None = ignored_field("indentation is the model's")
    n_probs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="probabilities of so many tokens per token"
    )
    return_tokens: bool | None = Field(None, description="as return_token_ids")
    image_data: Annotated[AnyItems | None, only_off_values([])] = off_only_field("an empty list")

    def make_completion_request(self, prompt: Any, **fields: Any) -> CompletionRequest:
        """Make the completion request with this prompt."""
        shared = {
            name: getattr(self, name)
            for name in GenerationFields.model_fields
            # its own fields, as t_max_predict_ms, have a meaning of their own
            if name in self.model_fields_set and name not in LlamaCppFields.__annotations__
        }
        shared["grammar"] = shared.pop("grammar_", None)
        if self.n_probs:
            shared["logprobs"] = self.n_probs
        if self.return_tokens:
            shared["return_token_ids"] = True
        set_fields = {name: value for name, value in shared.items() if value is not None}
        return make_converted_request(
            MixedCompletionRequest,
            {
                "model": self.model,
                "prompt": prompt,
                "n_predict": NO_TOKEN_LIMIT,
                **set_fields,
                **fields,
            },
        )

    def rename_error_fields(self, text: str) -> str:
        """Rewrite an error about the completion request to name the fields of this API."""
        return text

    @abstractmethod
    def prompts(self) -> list[MixedPrompt]:
        """The prompts as a list; raises RequestError."""

    def check(self) -> None:
        """Raise RequestError for what these routes do not return."""
        if (self.n or 1) > 1:
            raise RequestError("n is not supported here; use /v1/completions")
        self.check_penalty_field_combinations()
        self.check_stream_fields()


class LlamaCppCompletionRequest(LlamaCppFields):
    """Request body of POST /completion."""

    prompt: Text | MixedPrompts = Field(
        description="a string, token ids, both in one list, or a list of such prompts"
    )
    parse_special: bool | None = Field(None, description="false: control tokens are plain text")

    def to_completion_request(self) -> CompletionRequest:
        """Convert to the equivalent completion request; control tokens are parsed by default."""
        has_texts = any(map(has_text, self.prompts()))
        special = self.parse_special is not False if has_texts else None
        return self.make_completion_request(self.prompt, parse_special=special)

    def prompts(self) -> list[MixedPrompt]:
        """See ``LlamaCppFields.prompts``."""
        return split_mixed_prompts(self.prompt)


class InfillExtraFile(StrictModel):
    """A further file that the model reads first; its time, which editors send, is ignored."""

    text: Text
    filename: str | None = None
    time: float | None = ignored_field("files are read in their order")


class InfillRequest(LlamaCppFields):
    """Request body of POST /infill: the text between a prefix and a suffix."""

    input_prefix: Text
    input_suffix: Text
    input_extra: JsonObjectList | None = None
    prompt: Text | None = Field(None, description="text that follows the prefix")
    stop: str | Annotated[list[str], FAIL_FAST] | None = Field(None, max_length=4096)

    def prompts(self) -> list[MixedPrompt]:
        """See ``LlamaCppFields.prompts``."""
        return [self.input_prefix]

    def rename_error_fields(self, text: str) -> str:
        """See ``LlamaCppFields.rename_error_fields``."""
        return _COMPLETION_FIELD_AT_START.sub(lambda match: _INFILL_NAMES[match[0]], text)

    def to_completion_request(self) -> CompletionRequest:
        """Convert to the equivalent completion request with a suffix."""
        extra = [
            parse_object(each, f"input_extra[{index}]", InfillExtraFile)
            for index, each in enumerate(self.input_extra or ())
        ]
        head = "".join(
            f"{each.filename}\n{each.text}\n\n" if each.filename else f"{each.text}\n\n"
            for each in extra
        )
        prefix = head + self.input_prefix + (self.prompt or "")
        return self.make_completion_request(prefix, suffix=self.input_suffix)
