"""Sampling defaults for requests that set none; the only place that decides them.

The checkpoint's generation_config applies to the command line, Python, the HTTP API and Triton,
with the meaning that transformers gives it: without ``do_sample: true`` decoding is greedy. Without
a generation_config (usual for a GGUF) the command line and Python use ``MODELMILL_DEFAULTS``;
clients of the HTTP API and of Triton get OpenAI's temperature 1 and top_p 1, which they expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.core.logits_processors import PROCESSOR_FIELDS, LogitsProcessors
from modelmill.core.quoting import quote
from modelmill.core.types import GENERATION_CONFIG_SAMPLING_FIELDS, SamplingParams

MODELMILL_DEFAULTS: Mapping[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 40,
    "min_p": 0.05,
}
"""For a request that sets none of them.

llama.cpp's filters at the temperature that Llama 3, Qwen3 and DeepSeek-R1 recommend: at 1 a small
model is wrong more often (``benchmarks/sampling_defaults.py`` counts it).
"""
OPENAI_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0}
CHECKPOINT_SOURCE, MODELMILL_SOURCE, OPENAI_SOURCE = "checkpoint", "modelmill", "openai"
MAX_KEYS_SHOWN = 20
"""Maximum number of keys that a warning lists."""
_NEUTRAL_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": (0, 50), "min_p": 0.0}
"""Keys that matter only for sampling, and transformers' own defaults, which say nothing."""
_LENGTH_KEYS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
_USED_KEYS = {
    *GENERATION_CONFIG_SAMPLING_FIELDS,
    *PROCESSOR_FIELDS,
    *_LENGTH_KEYS,
    "do_sample",
    "stop_strings",
    "eos_token_id",
}
# ids of other uses, the chat formats of Qwen v1 and Baichuan, and options for the speed and outputs
# of transformers
_IGNORED_KEYS = frozenset((
    "bos_token_id", "pad_token_id", "decoder_start_token_id", "chat_format", "max_window_size",
    "user_token_id", "assistant_token_id",
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "remove_invalid_values", "transformers_version",
    "_from_model_config", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight", "speculation_type", "use_mtp", "compile_config", "disable_compile",
    "continuous_batching_config", "low_memory", "prefill_chunk_size", "use_model_defaults",
))  # fmt: skip
_REQUEST_ONLY_REASON = "applies only if a request sets it"
_NOT_OFFERED_REASON = "is not offered"
# key → (values without effect, why it is not applied)
_UNSUPPORTED_KEYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), _REQUEST_ONLY_REASON),
    "num_return_sequences": ((1,), f"{_REQUEST_ONLY_REASON} (n)"),
    "length_penalty": ((1,), _REQUEST_ONLY_REASON),
    "early_stopping": ((False,), _REQUEST_ONLY_REASON),
    "typical_p": ((1,), _NOT_OFFERED_REASON),
    "epsilon_cutoff": ((0,), _NOT_OFFERED_REASON),
    "eta_cutoff": ((0,), _NOT_OFFERED_REASON),
    "top_h": ((), _NOT_OFFERED_REASON),
    "penalty_alpha": ((0,), f"(contrastive search) {_NOT_OFFERED_REASON}"),
    "dola_layers": ((), _NOT_OFFERED_REASON),
    "num_beam_groups": ((1,), _NOT_OFFERED_REASON),
    "diversity_penalty": ((0,), _NOT_OFFERED_REASON),
    "constraints": ((), _NOT_OFFERED_REASON),
    "force_words_ids": ((), _NOT_OFFERED_REASON),
    "guidance_scale": ((1,), _NOT_OFFERED_REASON),
    "watermarking_config": ((), _NOT_OFFERED_REASON),
    "token_healing": ((False,), _NOT_OFFERED_REASON),
    "max_time": ((), _NOT_OFFERED_REASON),
}


@dataclass(frozen=True)
class GenerationDefaults:
    """The defaults of an engine's requests.

    Attributes:
        sampling: SamplingParams fields that configure sampling, and the repetition penalty.
        greedy: decoding is greedy unless a request sets sampling parameters.
        max_tokens: of the answer.
        max_length: in tokens, prompt included.
        min_tokens: of the answer.
        min_length: in tokens, prompt included.
        unused: keys of generation_config without effect here, and why.
        source: where the defaults come from, one of the ``*_SOURCE`` constants.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    greedy: bool = False
    max_tokens: int | None = None
    max_length: int | None = None
    min_tokens: int | None = None
    min_length: int | None = None
    stop: tuple[str, ...] = ()
    processors: LogitsProcessors = field(default_factory=LogitsProcessors)
    unused: Mapping[str, str] = field(default_factory=dict)
    source: str = CHECKPOINT_SOURCE

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """SamplingParams fields that do not depend on the prompt's length."""
        result = dict(self.sampling)
        if self.greedy:
            result["temperature"] = 0.0
        for name in ("max_tokens", "min_tokens", "stop"):
            if getattr(self, name):
                result[name] = getattr(self, name)
        if self.processors:
            result["logits_processors"] = self.processors
        return result

    @property
    def has_max_length(self) -> bool:
        """Whether answers have a maximum length if a request sets none."""
        return self.max_tokens is not None or self.max_length is not None

    def resolve(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        """Return ``params`` with every unset field set.

        An answer to a prompt that reaches the checkpoint's max_length is limited only by the
        context.

        Args:
            params: of the request.
            prompt_length: of its prompt in tokens.
        """
        filled = dict(self.values)
        if self.source == MODELMILL_SOURCE and any(
            getattr(params, name) is not None for name in MODELMILL_DEFAULTS
        ):
            # a request with its own sampling parameters does not also get our filters
            filled = {
                name: value for name, value in filled.items() if name not in MODELMILL_DEFAULTS
            }
        if self.greedy and request_implies_sampling(params):
            filled["temperature"] = self.sampling.get("temperature", 1.0)
        bounded = (
            self.max_length is not None and self.max_tokens is None and params.max_tokens is None
        )
        # Llama 3's max_length is half its context: a longer prompt may use the whole context
        if bounded and self.max_length is not None and prompt_length < self.max_length:
            filled["max_tokens"] = self.max_length - prompt_length
        if self.min_length is not None and self.min_tokens is None:
            filled["min_tokens"] = max(self.min_length - prompt_length, 0)
        return params.with_defaults(filled)

    def to_dict(self) -> dict[str, Any]:
        """Return the defaults for JSON: values, one line of text, their source, unused keys."""
        return {
            "values": self._display_values(),
            "text": self.summary_line(),
            "source": self.source,
            "unused": dict(self.unused),
        }

    def _display_values(self) -> dict[str, Any]:
        shown = {name: value for name, value in self.values.items() if name != "logits_processors"}
        shown |= {
            name: getattr(self, name)
            for name in ("max_length", "min_length")
            if getattr(self, name)
        }
        return shown | self.processors.non_default()

    def summary_line(self) -> str:
        """Describe the defaults in one line for people."""
        shown = self._display_values()
        if self.greedy:
            shown = {name: value for name, value in shown.items() if name not in _NEUTRAL_SAMPLING}
            shown = {"greedy": "", **shown}
        text = (
            ", ".join(
                f"{name} {_format_number_or_empty(value)}".strip() for name, value in shown.items()
            )
            or "temperature 1.0"
        )
        origins = {
            CHECKPOINT_SOURCE: "from the checkpoint's generation_config",
            MODELMILL_SOURCE: "modelmill's own: the checkpoint sets none",
            OPENAI_SOURCE: "OpenAI's: the checkpoint sets none",
        }
        return f"{text} ({origins[self.source]})"

    def unused_warning(self) -> str | None:
        """Name the generation_config keys without effect in one line; None if there are none."""
        if not self.unused:
            return None
        listed = [f"{name} {why}" for name, why in self.unused.items()]
        more = [f"and {len(listed) - MAX_KEYS_SHOWN} more"] if len(listed) > MAX_KEYS_SHOWN else []
        return f"without effect in generation_config: {'; '.join(listed[:MAX_KEYS_SHOWN] + more)}"


def _format_number_or_empty(value: Any) -> str:
    """Format a number; a list or string is left out, since one line would not hold it."""
    return str(value) if isinstance(value, int | float) else ""


def request_implies_sampling(params: SamplingParams) -> bool:
    """Whether a request without a temperature still needs sampling (top_p, top_k, min_p, n)."""
    if params.num_beams > 1 or params.temperature is not None:
        return False
    filtered = (
        params.top_p not in (None, 0.0, 1.0)
        or params.top_k not in (None, 0, -1, 1)
        or bool(params.min_p)
    )
    return filtered or params.n > 1


def parse_generation_config(
    raw: Mapping[str, Any], container: str = "", *, openai: bool = False
) -> GenerationDefaults:
    """Read a checkpoint's generation_config.

    Args:
        raw: the generation_config.
        container: of the checkpoint; a GGUF's generation_config is made from its keys and always
            holds the ids.
        openai: use OPENAI_DEFAULTS if the checkpoint sets none, for clients of an API.

    Raises:
        RequestError: if a value is invalid; the message names the key.
    """
    processors = LogitsProcessors.from_generation_config(raw)
    lengths = {name: _checked_length(name, raw.get(name)) for name in _LENGTH_KEYS}
    draws = {
        name: raw[name] for name in GENERATION_CONFIG_SAMPLING_FIELDS if raw.get(name) is not None
    }
    SamplingParams(**draws)
    greedy, source = raw.get("do_sample") is not True, CHECKPOINT_SOURCE
    if _lacks_generation_config(raw, container):
        source = OPENAI_SOURCE if openai else MODELMILL_SOURCE
        draws, greedy = dict(OPENAI_DEFAULTS if openai else MODELMILL_DEFAULTS), False
    limit, least = lengths["max_new_tokens"] or None, lengths["min_new_tokens"]
    return GenerationDefaults(
        sampling=draws,
        greedy=greedy,
        max_tokens=limit,
        max_length=lengths["max_length"] or None,
        min_tokens=least if least is None or limit is None else min(least, limit),
        min_length=lengths["min_length"],
        stop=_parse_stop_strings(raw.get("stop_strings")),
        processors=processors,
        unused=_unused_key_reasons(raw, greedy),
        source=source,
    )


def _lacks_generation_config(raw: Mapping[str, Any], container: str) -> bool:
    """Whether the checkpoint has no generation_config, or one made only from a GGUF's ids."""
    return not raw or (container.rpartition("/")[2].startswith("gguf") and "do_sample" not in raw)


def _unused_key_reasons(raw: Mapping[str, Any], greedy: bool) -> dict[str, str]:
    """Return keys without effect here that transformers applies or does not know, and why."""
    unused: dict[str, str] = {}
    for name, value in raw.items():
        if value is None or name in _IGNORED_KEYS:
            continue
        if (
            greedy
            and name in _NEUTRAL_SAMPLING
            and not _is_neutral_value(value, _NEUTRAL_SAMPLING[name])
        ):
            unused[name] = "applies only if a request samples (do_sample is not true)"
        elif name in _UNSUPPORTED_KEYS and not _is_neutral_value(value, _UNSUPPORTED_KEYS[name][0]):
            unused[name] = _UNSUPPORTED_KEYS[name][1]
        elif name not in _USED_KEYS and name not in _UNSUPPORTED_KEYS:
            unused[quote(name, 60).strip("'\"")] = "is not known"
    return unused


def _is_neutral_value(value: Any, neutral: Any) -> bool:
    return value in (neutral if isinstance(neutral, tuple) else (neutral,)) or value in ([], {})


def _checked_length(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RequestError(f"{name} must be an integer of at least 0, not {quote(value, 60)}")
    # some files say "no limit" with a very large number
    return min(value, 2**31 - 1)


def _parse_stop_strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    try:
        return SamplingParams(stop=value).stop
    except RequestError:
        raise RequestError(
            f"stop_strings must be a string or a list of strings, not {quote(value, 60)}"
        ) from None
