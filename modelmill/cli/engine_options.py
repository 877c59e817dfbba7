"""What the verbs that run an engine have in common: its options, and opening it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.options import inherit_option
from modelmill.cli.output import show_progress
from modelmill.core.config import BuildConfig, RunConfig

if TYPE_CHECKING:
    from modelmill.llm import LLM

ENGINE_HELP = "an engine folder, or a checkpoint (it is built into the cache first)"

REFERENCE_GPU_FRACTION = 0.45
"""Share of the GPU that an engine takes where transformers runs beside it."""

SAMPLING_HELP = {
    "n": "answers per prompt",
    "temperature": "0 is greedy; unset: the engine's own default",
    "top_p": "keep the most likely tokens up to this total probability",
    "top_k": "keep the K most likely tokens (0: all)",
    "min_p": "keep tokens at least this likely, relative to the most likely one",
    "max_tokens": "longest answer in tokens (default: the engine's own, else 512)",
    "min_tokens": "no stop before this many tokens",
    "stop": "text that ends the answer (repeatable)",
    "stop_token_ids": "token ids that end the answer",
    "seed": "seed; one per request gives the same text alone and in a batch",
    "logprobs": "log probabilities of this many most likely tokens",
    "prompt_logprobs": "the same for the prompt's tokens",
    "presence_penalty": "penalty for tokens that occurred",
    "frequency_penalty": "penalty for each time a token occurred",
    "repetition_penalty": "divide the logits of tokens that occurred",
    "logit_bias": "ID=BIAS added to a token's logit (repeatable)",
    "ignore_eos": "go on after the end-of-text token",
    "num_beams": "beam search with this many beams",
    "length_penalty": "exponent of the length in a beam's score",
    "early_stopping": "stop the beam search at num_beams finished answers",
    "skip_special_tokens": "leave special tokens out of the text",
    "include_stop": "keep the stop text in the answer",
}


@dataclass(frozen=True, kw_only=True)
class CacheBuildOptions:
    """How a checkpoint is built when it stands where an engine is wanted; not used for an
    engine.
    """

    dtype: str = inherit_option(BuildConfig, "dtype", help="for a checkpoint: type to build it in")
    quantization: str = inherit_option(
        BuildConfig, "quantization", help="for a checkpoint: weight recipe to build it with"
    )


def open_llm(model: Path, build: CacheBuildOptions, run: RunConfig, **llm_options: Any) -> LLM:
    """An LLM for an engine; a checkpoint is built into the cache first, and LLM says so on stderr.

    A dtype or recipe that is given together with an engine is refused by LLM. llm_options: LLM's
    own options.
    """
    with show_progress(f"opening {model.name}", lines=True) as told:
        from modelmill.llm import LLM  # inside, since torch takes seconds to import

        given = {name: value for name, value in llm_options.items() if value is not None}
        return LLM(
            model, progress=told, **non_default_fields(build), **non_default_fields(run), **given
        )


def share_gpu_with_reference(run: RunConfig) -> RunConfig:
    """``run`` with half of the GPU left for transformers, unless a share was asked for."""
    asked = (
        run.gpu_memory_utilization != RunConfig().gpu_memory_utilization
        or run.kv_cache_bytes is not None
    )
    return run if asked else replace(run, gpu_memory_utilization=REFERENCE_GPU_FRACTION)


def non_default_fields(config: Any) -> dict[str, Any]:
    """The fields of a config that differ from their defaults: what was asked for."""
    default = type(config)()
    pairs = ((each.name, getattr(config, each.name)) for each in fields(config))
    return {name: value for name, value in pairs if value != getattr(default, name)}
