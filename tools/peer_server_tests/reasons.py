"""Why tests do not pass: rules over the failed statement, its message and the refused request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Group(Enum):
    """Kinds of reasons."""

    ANSWERS = "the model's own answers"
    PURPOSE = "different on purpose"
    PRIVATE = "private to llama.cpp"
    LACKING = "a real difference"


@dataclass(frozen=True)
class Reason:
    """A reason of failed tests.

    Attributes:
        group: its kind.
        pattern: a regex of what the run notes of a failed test, a line each: the test, its message,
            the failed statement, the last refused request.
        text: the reason.
    """

    group: Group
    pattern: str
    text: str


REASONS = (
    Reason(
        Group.ANSWERS,
        r"match_regex\(|most_relevant\[|least_relevant\[",
        "the text that a sampler with llama.cpp's random numbers writes, or another model's scores",
    ),
    Reason(
        Group.ANSWERS,
        r"(test_embedding|test_rerank).*== (\d \* )?n_tokens|test_embedding.*== 2 \* 9",
        "counts of another model's tokenizer",
    ),
    Reason(
        Group.PRIVATE,
        r"(GET|POST) /slots",
        "`/slots`: there are none; every request may use every cached prefix",
    ),
    Reason(
        Group.PRIVATE,
        r"__verbose|verbose: unknown field",
        "`__verbose`; the prompt is shown by `/apply-template`, and by `response_fields`",
    ),
    Reason(
        Group.PRIVATE,
        r"/cors-proxy|/sw\.js",
        "files and a proxy of llama.cpp's page",
    ),
    Reason(
        Group.PRIVATE,
        r"fetch_metrics|test_metrics_disabled",
        "names and a header of llama.cpp's metrics; `/metrics` is always there, under other names",
    ),
    Reason(Group.PRIVATE, r"\.gguf", "the path of a GGUF file; an engine is a folder"),
    Reason(
        Group.PRIVATE,
        r"system_fingerprint|adaptive_(target|decay)",
        "a fingerprint that begins with llama.cpp's `b`, settings of its samplers; most of these "
        "tests also ask for a text of its random numbers",
    ),
    Reason(
        Group.PRIVATE,
        r"test_ignore_eos_populates",
        "`ignore_eos` as biases of tokens; here it is a setting of its own",
    ),
    Reason(
        Group.PURPOSE,
        r"delta.*content.* is None|Expected non empty content delta",
        'the first event of a chat has `content: ""`, as OpenAI\'s; llama.cpp has null',
    ),
    Reason(
        Group.PURPOSE,
        r"exceed_context_size_error|exceeds the available context size|too large' in",
        "a prompt that is too long has OpenAI's type and code of an error, and words of our own",
    ),
    Reason(
        Group.PURPOSE,
        r"test_correct_api_key",
        "`/completions` is OpenAI's path without `/v1`; llama.cpp's own is `/completion`",
    ),
    Reason(
        Group.PURPOSE,
        r"test_server_model_aliases_and_tags",
        "each name of a model is an entry of `/v1/models`, as vLLM lists them; there are no tags",
    ),
    Reason(
        Group.PURPOSE,
        r"test_cors_|Access-Control",
        "allowed origins are listed one by one, or `*` without credentials; others get a 400, and "
        "`localhost` does not stand for every port",
    ),
    Reason(
        Group.PURPOSE,
        r"test_template.*(endswith\(expected_end\)|today_str|'functions' is undefined)",
        "templates get transformers' variables; these copies of them need more "
        "(`enable_thinking` of every request, `date_string`, `functions`)",
    ),
    Reason(
        Group.PURPOSE,
        r"there is no model",
        "a model's name that is not served is an error",
    ),
    Reason(
        Group.PURPOSE,
        r"messages: must have at least 1|input is empty|test_invalid_chat_completion_req",
        "an empty input is an error; two answers in a row are none",
    ),
    Reason(
        Group.PURPOSE,
        r"cached_tokens.* == n_cache",
        "prefixes are cached in whole pages of 16 tokens",
    ),
    Reason(
        Group.PURPOSE,
        r"post_sampling_probs: is not supported",
        "`post_sampling_probs`: log-probabilities are the model's, before sampling",
    ),
    Reason(
        Group.PURPOSE,
        r"assert res\.status_code == 500\n",
        "a picture for a model that sees none is a 400; llama.cpp sends a 500",
    ),
    Reason(
        Group.LACKING,
        r"prompt_progress|last_progress|len\(progress\)|timings_per_token: unknown field",
        "`return_progress`: streams do not tell how much of the prompt is read; `/v1/responses` "
        "has no `timings_per_token`",
    ),
    Reason(
        Group.LACKING,
        r"logit_bias( takes token ids|: number 0 must begin with a token id)",
        "`logit_bias` with texts in the place of token ids (`/tokenize` has the ids)",
    ),
    Reason(
        Group.LACKING,
        r"test_embedding.*POST /v1/embeddings: 400 .*(input: must be|must be an integer)",
        "`/v1/embeddings` with objects, or texts and ids in one input",
    ),
    Reason(
        Group.LACKING,
        r"POST /completion: 400 .*prompt",
        "`/completion` with an object as the prompt",
    ),
)


def find_reason(test: str, outcome: Mapping[str, str]) -> Reason | None:
    """The first reason that holds for a failed test; None where there is none.

    Args:
        test: its name.
        outcome: what the run notes of it.
    """
    noted = [test.partition("[")[0], *(outcome.get(key, "") for key in ("message", "line"))]
    text = "\n".join([*noted, outcome.get("answer", "")])
    return next((each for each in REASONS if re.search(each.pattern, text, re.DOTALL)), None)
