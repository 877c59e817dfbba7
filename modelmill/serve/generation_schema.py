"""Fields that completions and chat completions share, and their sampling parameters and grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from modelmill.core.errors import RequestError
from modelmill.core.types import MAX_INT32, TOKEN_IDS_GRAMMAR, Grammar, SamplingParams
from modelmill.serve.compatibility_fields import CompatibilityFields
from modelmill.serve.logit_bias import parse_logit_bias
from modelmill.serve.prompt_fields import TextList, TokenIds
from modelmill.serve.sampling_schema import SamplingFields, sampling_field
from modelmill.serve.schema_relaxation import relax_grammar_if_needed
from modelmill.serve.strict_models import JsonObject, StrictModel
from modelmill.serve.structured_outputs_schema import ResponseFormat
from modelmill.text.gbnf import gbnf_to_lark_grammar
from modelmill.text.message_validation import check_json_data

MAX_TOP_LOGPROBS = 20
MAX_BAD_WORDS = 1024
NO_TOKEN_LIMIT = -1
"""The value of max_tokens and n_predict that llama.cpp and LM Studio take as no limit."""

MIN_TOKENS_WARNING = "min_tokens has no effect: the grammar decides where the answer ends"


class StreamOptions(StrictModel):
    """include_usage: one more chunk at the end with the usage.

    continuous_usage_stats: the usage so far in every chunk. include_obfuscation: accepted and
    ignored.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(SamplingFields, CompatibilityFields):
    """Fields of completions and chat completions."""

    n: int | None = sampling_field("n")
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    # extensions, as vLLM names them
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_INT32, description="keep the last so many tokens; -1: as many as fit"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="right: truncate_prompt_tokens keeps the first ones"
    )
    bad_words: TextList | None = Field(None, max_length=MAX_BAD_WORDS)
    allowed_token_ids: TokenIds | None = Field(None, min_length=1)
    # extensions, as llama.cpp names them
    n_predict: int | None = Field(
        None, ge=NO_TOKEN_LIMIT, le=MAX_INT32, description="as max_tokens; -1: unset"
    )
    json_schema: JsonObject | None = Field(None, description="as structured_outputs.json")
    grammar_: str | None = Field(None, alias="grammar", description="in GBNF")
    timings_per_token: bool | None = None
    cache_prompt: bool | None = Field(None, description="false: use no cached prefix")
    repeat_penalty: float | None = sampling_field("repetition_penalty")
    repeat_last_n: int | None = Field(None, ge=-1, le=MAX_INT32)
    _warnings: list[str] = PrivateAttr(default_factory=list)

    def sampling_params(self) -> SamplingParams:
        """Convert to SamplingParams. Raises RequestError."""
        raise NotImplementedError

    def make_sampling_params(self, **more: Any) -> SamplingParams:
        """Convert to SamplingParams, with ``more`` fields.

        Raises:
            RequestError: a value is invalid.
        """
        names = (
            "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        if self.repeat_penalty is not None:
            values["repetition_penalty"] = self.repeat_penalty
        return SamplingParams(
            **values,
            n=self.n or 1,
            stop=self.stop or (),  # type: ignore[arg-type]
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=self.min_tokens or 0,
            logit_bias=parse_logit_bias(self.logit_bias),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
            include_stop=bool(self.include_stop_str_in_output),
            **more,
        )

    def grammar(self) -> Grammar | None:
        """Return the constraint on the output, if any.

        Raises:
            RequestError: the fields contradict each other.
        """
        grammars: dict[str, Grammar | None] = {}
        if self.response_format is not None:
            grammars["response_format"] = self.response_format.to_grammar()
        if self.structured_outputs is not None:
            grammars["structured_outputs"] = self.structured_outputs.to_grammar()
        if self.json_schema is not None:
            check_json_data(self.json_schema, "json_schema: the JSON schema")
            grammars["json_schema"] = Grammar("json", json.dumps(self.json_schema))
        if self.grammar_:  # "" is llama.cpp's default
            grammars["grammar"] = gbnf_to_lark_grammar(self.grammar_)
        if self.allowed_token_ids is not None:
            ids = sorted(set(self.allowed_token_ids))
            grammars["allowed_token_ids"] = Grammar(TOKEN_IDS_GRAMMAR, json.dumps(ids))
        names = [name for name, grammar in grammars.items() if grammar is not None]
        if len(names) > 1:
            raise RequestError(f"{names[0]} and {names[1]} exclude each other; give one of them")
        return grammars[names[0]] if names else None

    def relax_and_validate_grammar(self) -> Grammar | None:
        """Return ``grammar`` after checking that it compiles.

        Raises:
            RequestError: it does not.
        """
        grammar = self.grammar()
        if grammar is None:
            return None
        if self.ignore_eos:
            raise RequestError(
                "ignore_eos has no meaning with structured output or a forced call; leave it out"
            )
        if grammar.grammar_type == TOKEN_IDS_GRAMMAR:
            return grammar
        usable, reasons = relax_grammar_if_needed(grammar, self.grammar_field)
        self.add_warnings(reasons)
        if self.min_tokens:
            self.add_warnings(
                ["min_tokens has no effect: the grammar decides where the answer ends"]
            )
        return usable

    def add_warnings(self, lines: Sequence[str]) -> None:
        """Record what of the request is not enforced."""
        self._warnings.extend(lines)

    def rename_warning_fields(self, rename_fields: Callable[[str], str]) -> None:
        """Name the fields of another API, whose request became this one."""
        self._warnings[:] = map(rename_fields, self._warnings)

    @property
    def warnings(self) -> list[str]:
        """What of the request was not enforced; known once its grammar has been validated."""
        return list(self._warnings)

    @property
    def grammar_field(self) -> str:
        """The field that constrains the output."""
        names = (
            ("structured_outputs", "structured_outputs"),
            ("json_schema", "json_schema"),
            ("grammar_", "grammar"),
            ("allowed_token_ids", "allowed_token_ids"),
        )
        present = (name for field, name in names if getattr(self, field) is not None)
        return next(present, "response_format")

    def _resolve_max_tokens(self, limit: int | None, default: int | None) -> int | None:
        """The limit of the output: ``limit``, else n_predict, else the default; -1: none."""
        limits = {"max_tokens", "max_completion_tokens"} & self.model_fields_set
        if self.n_predict is not None and not limits:
            limit = self.n_predict
        resolved = default if limit is None else limit
        return None if resolved == NO_TOKEN_LIMIT else resolved

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every event of a stream has the usage so far."""
        return self.wants_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def check_penalty_field_combinations(self) -> None:
        """Raise RequestError for a penalty of the last tokens alone, or with two names."""
        if self.repeat_penalty is not None and self.repetition_penalty is not None:
            raise RequestError("repeat_penalty is repetition_penalty; give one of them")
        penalized = (
            self.repeat_penalty not in (None, 1.0) or self.presence_penalty or
            self.frequency_penalty
        )  # fmt: skip
        if penalized and self.repeat_last_n not in (None, -1):
            raise RequestError(
                "repeat_last_n is not supported: penalties count the whole text (-1)"
            )

    def check_stream_fields(self) -> None:
        """Raise RequestError for stream_options without stream."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs is only for answers that are not streamed")
