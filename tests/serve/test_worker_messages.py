"""Messages survive the wire."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.types import FinishReason, Logprob, Request, SamplingParams, TokenOutput
from modelmill.serve import worker_messages as wire

PARAMS = SamplingParams(
    n=2, temperature=0.5, seed=2**63, logit_bias={5: -100.0}, stop_token_ids=(3,), ignore_eos=True
)
PROCESSORS = LogitsProcessors(
    sequence_bias=(((3, 4), -2.5),), no_repeat_ngram_size=3, encoder_no_repeat_ngram_size=2,
    bad_words_ids=((3, 5),),
    encoder_repetition_penalty=1.5, forced_bos_token_id=3, forced_eos_token_id=(7, 8),
    suppress_tokens=(1,),
    exponential_decay_length_penalty=(3, 1.5), begin_suppress_tokens=(2,), renormalize_logits=True,
)  # fmt: skip
TOP = Logprob(-math.inf, 2)
MESSAGES: list[wire.Message] = [
    wire.OpenEngine("a b", {"dtype": "float32"}, {"kernels": {"linear": "torch"}}, False, "chatml",
    [5]),  # type: ignore[arg-type]
    wire.AddRequest(
        Request(id="r1", prompt=(1, 2), params=PARAMS, eos_ids=(7,), cache_salt="tenant")
    ),
    wire.AddRequest(
        Request(id="r2", prompt=(1,), params=SamplingParams(logits_processors=PROCESSORS),
        penalize_prompt=False)
    ),
    wire.AddRequest(Request(id="r3", prompt=(1,),
    params=SamplingParams(logits_processors=LogitsProcessors()))),
    wire.AbortRequest("r1"),
    wire.FinishSequence("r1", 3),
    wire.GetStats(9),
    wire.Ping(),
    wire.Heartbeat(),
    wire.LoadingUpdate("checking", 3, 2**40),
    wire.EngineReady("p", "cpu", 10, 20, 30, 16, 4096, 8, max_prefix_pages=10, kv_tokens=480),
    wire.EngineReady("p", "cpu", 10, 20, 30, 16, 4096, 8, experts_by_rank=[3, 2]),
    wire.RequestStarted("r1", 0.25),
    wire.StepTokens([
        TokenOutput("r1", 0, 5),
        TokenOutput("r1", 1, None, finish_reason=FinishReason.ABORT, cached_tokens=3),
        TokenOutput("r1", 0, 6, {6: Logprob(-0.5, 1), 9: TOP}, FinishReason.STOP, 6,
        [None, {1: Logprob(-1.0, 1)}]),
        TokenOutput("r1", 0, None, finish_reason=FinishReason.LENGTH, replayed_ids=(1, 2),
        score=-2.25),
    ]),
    wire.RequestRejected("r1", "the prompt is empty"),
    wire.RequestRejected("r1", "no memory", out_of_memory=True),
    wire.StatsReply(9, {"running": 1, "pages_by_window": {"all": 3, "128": 2}}),
    wire.OpenFailed("no such file", True),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: wire.Message) -> None:
    frame = wire.encode_frame(message)
    assert (
        wire.LENGTH_PREFIX.unpack(frame[: wire.LENGTH_PREFIX.size])[0]
        == len(frame) - wire.LENGTH_PREFIX.size
    )
    assert wire.decode_frame_body(frame[wire.LENGTH_PREFIX.size :]) == message


@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.lists(st.integers(0, 4000), max_size=12))
def test_frames_come_out_whole_however_they_were_cut(
    messages: list[wire.Message], cuts: list[int]
) -> None:
    stream = b"".join(wire.encode_frame(message) for message in messages)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    buffer, received = bytearray(), []
    for begin, end in pairwise(edges):
        buffer += stream[begin:end]
        received += wire.decode_frames(buffer)
    assert received == messages
    assert not buffer


def test_stop_strings_stay_with_the_text_side() -> None:
    request = Request(id="r", prompt=(1,), params=SamplingParams(stop=("secret",)))
    frame = wire.encode_frame(wire.AddRequest(request))
    assert b"secret" not in frame
    assert wire.decode_frame_body(frame[wire.LENGTH_PREFIX.size :]).request.params.stop == ()  # type: ignore[union-attr]
