"""What llama.cpp's answers say of their request, and the fields that a request chooses of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.core.types import SamplingParams

_LLAMA_CPP_FIELD_NAMES = {"repetition_penalty": "repeat_penalty"}
_SAMPLING_FIELD_NAMES = (
    "seed", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip


def generation_settings(
    params: SamplingParams, defaults: Mapping[str, Any], *, stream: bool
) -> dict[str, Any]:
    """The settings of an answer, by llama.cpp's names; None: the model's or the server's own.

    Args:
        params: of the request.
        defaults: the engine's sampling parameters, for those that the request does not set.
        stream: whether the answer is streamed.
    """
    settings: dict[str, Any] = {}
    for name in _SAMPLING_FIELD_NAMES:
        value = getattr(params, name)
        settings[_LLAMA_CPP_FIELD_NAMES.get(name, name)] = (
            defaults.get(name) if value is None else value
        )
    limit = -1 if params.max_tokens is None else params.max_tokens
    return {
        **settings,
        "n_predict": limit,
        "max_tokens": limit,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "logit_bias": [{"token": id, "bias": bias} for id, bias in params.logit_bias.items()],
        "n_probs": params.logprobs or 0,
        "stream": stream,
    }


def select_fields(answer: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The fields of an answer at these paths, by path; those that it lacks are left out.

    Args:
        answer: whole, or the last event of a stream.
        paths: names, with ``/`` between those of objects inside objects.
    """
    selected: dict[str, Any] = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            if not isinstance(value, Mapping) or name not in value:
                break
            value = value[name]
        else:
            selected[path] = value
    return selected
