"""Messages survive the wire."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.types import Finish, Logprob, Request, SamplingParams, Token
from modelmill.serve.message import (
    HEAD,
    Abort,
    Add,
    Ask,
    Begun,
    Count,
    End,
    Failed,
    Heartbeat,
    Loading,
    Message,
    Open,
    Ping,
    Ready,
    Refused,
    Told,
    decode,
    encode,
    unpacked,
)

PARAMS = SamplingParams(n=2, temperature=0.5, seed=2**63, logit_bias={5: -100.0}, stop_token_ids=(3,), ignore_eos=True)
PROCESSORS = LogitsProcessors(
    sequence_bias=(((3, 4), -2.5),), no_repeat_ngram_size=3, encoder_no_repeat_ngram_size=2, bad_words_ids=((3, 5),),
    encoder_repetition_penalty=1.5, forced_bos_token_id=3, forced_eos_token_id=(7, 8), suppress_tokens=(1,),
    exponential_decay_length_penalty=(3, 1.5), begin_suppress_tokens=(2,), renormalize_logits=True,
)  # fmt: skip
TOP = Logprob(-math.inf, 2)
MESSAGES: list[Message] = [
    Open("a b", {"dtype": "float32"}, {"kernels": {"linear": "torch"}}, False, "chatml", [5]),  # type: ignore[arg-type]
    Add(Request(id="r1", prompt=(1, 2), params=PARAMS, eos_ids=(7,), cache_salt="tenant")),
    Add(Request(id="r2", prompt=(1,), params=SamplingParams(logits_processors=PROCESSORS), prompt_counts=False)),
    Add(Request(id="r3", prompt=(1,), params=SamplingParams(logits_processors=LogitsProcessors()))),
    Abort("r1"),
    End("r1", 3),
    Ask(9),
    Ping(),
    Heartbeat(),
    Loading("checking", 3, 2**40),
    Ready("p", "cpu", 10, 20, 30, 16, 4096, 8, kept_pages=10),
    Begun("r1", 0.25),
    Told([
        Token("r1", 0, 5),
        Token("r1", 1, None, finish=Finish.ABORT, cached_tokens=3),
        Token("r1", 0, 6, {6: Logprob(-0.5, 1), 9: TOP}, Finish.STOP, 6, [None, {1: Logprob(-1.0, 1)}]),
        Token("r1", 0, None, finish=Finish.LENGTH, replay=(1, 2), score=-2.25),
    ]),
    Refused("r1", "the prompt is empty"),
    Refused("r1", "no memory", memory=True),
    Count(9, {"running": 1}),
    Failed("no such file", True),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    frame = encode(message)
    assert HEAD.unpack(frame[: HEAD.size])[0] == len(frame) - HEAD.size
    assert decode(frame[HEAD.size :]) == message


@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.lists(st.integers(0, 4000), max_size=12))
def test_frames_come_out_whole_however_they_were_cut(messages: list[Message], cuts: list[int]) -> None:
    stream = b"".join(encode(message) for message in messages)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    held, found = bytearray(), []
    for begin, end in pairwise(edges):
        held += stream[begin:end]
        found += unpacked(held)
    assert found == messages
    assert not held


def test_stop_strings_stay_with_the_text_side() -> None:
    request = Request(id="r", prompt=(1,), params=SamplingParams(stop=("secret",)))
    frame = encode(Add(request))
    assert b"secret" not in frame
    assert decode(frame[HEAD.size :]).request.params.stop == ()  # type: ignore[union-attr]
