"""Fields of other servers' APIs that change nothing here, or only switch off what is not there.

This is the one list of them: requests are validated by it, and the page docs/request-fields.md is
written from it (``python -m tools.request_fields_page``). A field that would change the answer in
silence is not among them: it is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from modelmill.serve.strict_models import (
    FAIL_FAST,
    MAX_ITEMS,
    JsonObject,
    Metadata,
    StrictModel,
    UnknownNullTolerantModel,
)

IGNORED_DESCRIPTION_PREFIX = "accepted and ignored: "
OFF_ONLY_DESCRIPTION_PREFIX = "only its value that means off: "


def ignored_field(reason: str, **limits: Any) -> Any:
    """A field that is accepted and ignored, with the reason."""
    return Field(None, description=IGNORED_DESCRIPTION_PREFIX + reason, **limits)


def off_only_field(reason: str) -> Any:
    """A field of which ``Off`` accepts the neutral values only."""
    return Field(None, description=OFF_ONLY_DESCRIPTION_PREFIX + reason)


def only_off_values(*values: Any) -> AfterValidator:
    """Validator: one of these values, which switch the feature off, or are what happens anyway."""

    def check(value: Any) -> Any:
        if value is not None and value not in values:
            raise ValueError(f"is not supported; leave it out, or send {values[0]!r}".lower())
        return value

    return AfterValidator(check)


Number = int | float
AnyItems = Annotated[list[Any], FAIL_FAST, Field(max_length=MAX_ITEMS)]


class AccountFields(StrictModel):
    """Fields about accounts, storage and billing of OpenAI's API."""

    user: str | None = ignored_field("there are no accounts", max_length=4096)
    store: bool | None = ignored_field("chats and completions are never stored")
    service_tier: str | None = ignored_field("there is one tier")
    safety_identifier: str | None = ignored_field("there are no accounts")
    prompt_cache_key: str | None = ignored_field(
        "every prefix is cached; cache_salt separates caches"
    )
    prompt_cache_retention: str | None = ignored_field(
        "cached prefixes stay until memory is needed"
    )
    prompt_cache_options: JsonObject | None = ignored_field("as prompt_cache_retention")


class VllmFields(UnknownNullTolerantModel):
    """Fields of every request of vLLM, which its clients send with their defaults."""

    request_id: str | None = ignored_field("send the header X-Request-Id", max_length=256)
    return_token_offsets: Annotated[bool | None, only_off_values(False)] = off_only_field("false")
    return_mm_kwargs: Annotated[bool | None, only_off_values(False)] = off_only_field("false")
    return_prompt_text: Annotated[bool | None, only_off_values(False)] = off_only_field("false")
    return_weight_versions: Annotated[bool | None, only_off_values(False)] = off_only_field("false")
    media_io_kwargs: Annotated[JsonObject | None, only_off_values({})] = off_only_field(
        "an empty object"
    )
    mm_processor_kwargs: Annotated[JsonObject | None, only_off_values({})] = off_only_field(
        "an empty object"
    )


class VllmGenerationFields(VllmFields):
    """Such fields of every request of vLLM that makes an answer."""

    spaces_between_special_tokens: bool | None = ignored_field(
        "tokens are decoded to their exact bytes"
    )
    use_beam_search: Annotated[bool | None, only_off_values(False)] = off_only_field(
        "false; num_beams is Python's"
    )
    length_penalty: Annotated[Number | None, only_off_values(1)] = off_only_field(
        "1: of beam search alone"
    )
    detokenize: Annotated[bool | None, only_off_values(True)] = off_only_field(
        "true: answers are text"
    )
    vllm_xargs: Annotated[JsonObject | None, only_off_values({})] = off_only_field(
        "an empty object"
    )


class EchoOffField(StrictModel):
    """``echo`` of requests that cannot repeat their prompt."""

    echo: Annotated[bool | None, only_off_values(False)] = off_only_field(
        "false; completions have it"
    )


class PoolingCompatibilityFields(VllmFields, EchoOffField):
    """Such fields of embeddings and of scores."""

    padding: Annotated[str | None, only_off_values("do_not_pad")] = off_only_field("do_not_pad")
    truncation_side: Annotated[str | None, only_off_values("right")] = off_only_field(
        "right: the first tokens are read"
    )
    embed_dtype: Annotated[str | None, only_off_values("float32")] = off_only_field("float32")
    endianness: Annotated[str | None, only_off_values("native", "little")] = off_only_field(
        "native or little"
    )
    use_activation: Annotated[bool | None, only_off_values(True)] = off_only_field(
        "true: vectors have length 1"
    )


class CompatibilityFields(VllmGenerationFields):
    """Fields of vLLM's, SGLang's and llama.cpp's chat and text completions."""

    metadata: Metadata | None = ignored_field("nothing is stored")
    prediction: JsonObject | None = ignored_field("it could only make the same answer faster")
    rid: str | None = ignored_field("as request_id", max_length=256)
    id_slot: int | None = ignored_field(
        "there are no slots: every request may use every cached prefix"
    )
    n_keep: int | None = ignored_field("a prompt that is too long is refused, never cut")
    n_discard: int | None = ignored_field("as n_keep")
    n_cache_reuse: int | None = ignored_field("prefixes alone are reused")
    return_progress: bool | None = ignored_field("progress is not reported in streams")
    return_tokens: bool | None = ignored_field("return_token_ids returns them")
    dry_base: Number | None = ignored_field("has no meaning with dry_multiplier 0")
    dry_allowed_length: int | None = ignored_field("as dry_base")
    dry_penalty_last_n: int | None = ignored_field("as dry_base")
    dry_sequence_breakers: AnyItems | None = ignored_field("as dry_base")
    xtc_threshold: Number | None = ignored_field("has no meaning with xtc_probability 0")
    dynatemp_exponent: Number | None = ignored_field("has no meaning with dynatemp_range 0")
    mirostat_tau: Number | None = ignored_field("has no meaning with mirostat 0")
    mirostat_eta: Number | None = ignored_field("as mirostat_tau")

    backend_sampling: bool | None = ignored_field("one sampler serves every device")

    typical_p: Annotated[Number | None, only_off_values(1)] = off_only_field("1")
    typ_p: Annotated[Number | None, only_off_values(1)] = off_only_field("1; as typical_p")
    tfs_z: Annotated[Number | None, only_off_values(1)] = off_only_field("1")
    top_n_sigma: Annotated[Number | None, only_off_values(-1)] = off_only_field("-1")
    mirostat: Annotated[int | None, only_off_values(0)] = off_only_field("0")
    dynatemp_range: Annotated[Number | None, only_off_values(0)] = off_only_field("0")
    xtc_probability: Annotated[Number | None, only_off_values(0)] = off_only_field("0")
    dry_multiplier: Annotated[Number | None, only_off_values(0)] = off_only_field("0")
    adaptive_target: Annotated[Number | None, only_off_values(-1)] = off_only_field("-1")
    min_keep: Annotated[int | None, only_off_values(0, 1)] = off_only_field("0 or 1")
    n_probs: Annotated[int | None, only_off_values(0)] = off_only_field("0; logprobs returns them")
    post_sampling_probs: Annotated[bool | None, only_off_values(False)] = off_only_field("false")
    early_stopping: Annotated[bool | None, only_off_values(False)] = off_only_field(
        "false: of beam search alone"
    )
    t_max_predict_ms: Annotated[Number | None, only_off_values(0, -1)] = off_only_field("0 or -1")
    lora: Annotated[AnyItems | None, only_off_values([])] = off_only_field("an empty list")


class ChatCompatibilityFields(EchoOffField):
    """Such fields of chat completions alone."""

    verbosity: str | None = ignored_field("the model writes as it writes; of chat alone")
    best_of: Annotated[int | None, only_off_values(1)] = off_only_field("1; of chat alone")
    documents: Annotated[AnyItems | None, only_off_values([])] = off_only_field(
        "an empty list; of chat alone"
    )
    parse_tool_calls: Annotated[bool | None, only_off_values(True)] = off_only_field(
        "true: calls are always parsed; of chat alone"
    )
    reasoning_format: Annotated[str | None, only_off_values("auto", "deepseek")] = off_only_field(
        "auto or deepseek: thinking is reasoning_content; of chat alone"
    )


def list_compatibility_fields(models: Sequence[type[StrictModel]]) -> list[tuple[str, str, str]]:
    """(field, "ignored" or "off only", reason or values) of these models, by name."""
    rows = {}
    for model in models:
        for name, field in model.model_fields.items():
            for prefix, kind in (
                (IGNORED_DESCRIPTION_PREFIX, "ignored"),
                (OFF_ONLY_DESCRIPTION_PREFIX, "off only"),
            ):
                if (field.description or "").startswith(prefix):
                    rows[name] = name, kind, (field.description or "").removeprefix(prefix)
    return [rows[name] for name in sorted(rows)]
