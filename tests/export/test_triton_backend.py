"""The backend with Triton's module replaced: every way that a request can end."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from modelmill.core.config import RunConfig
from modelmill.core.errors import RequestError, UsageError
from modelmill.core.types import SamplingParams
from modelmill.export.triton_backend import (
    TritonBackend,
    check_one_instance_per_device,
    set_python_executable,
    with_triton_device,
)
from modelmill.export.triton_repository import EngineStartOptions, export_triton_repository
from modelmill.export.triton_tensors import parse_request
from modelmill.llm import LLM
from tests.export import fake_triton_utils
from tests.export.fake_triton_utils import Refused, Request, TritonError
from tests.stories import STORY_STARTS
from tests.wait import TIMEOUT_SECONDS, wait_until

GREEDY = {"temperature": 0.0, "max_tokens": 40}
RUN = {"device": "cpu", "threads": 1, "kv_cache_bytes": 4 << 20, "max_num_seqs": 8}


def open_backend(repository: Path, **more: Any) -> TritonBackend:
    args = {
        "model_config": json.dumps({"instance_group": [{"count": 1, "kind": "KIND_CPU"}], **more}),
        "model_repository": str(repository),
        "model_version": "1",
        "model_name": "stories",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }
    return TritonBackend.open(fake_triton_utils, args)


@pytest.fixture(scope="module")
def repository(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("repo")
    return export_triton_repository(
        stories, out, start_options=EngineStartOptions(run=RUN, chat_template="chatml", waiting=56)
    )


@pytest.fixture(scope="module")
def backend(repository: Path) -> Iterator[TritonBackend]:
    with closing(open_backend(repository)) as opened_:
        yield opened_


@pytest.fixture(scope="module")
def llm(stories: Path) -> LLM:
    return LLM(stories, chat_template="chatml", **RUN)


def idle(backend: TritonBackend) -> bool:
    stats = backend._async_llm.llm.engine_core.stats()
    return (
        stats.running == stats.waiting == 0
        and stats.free_pages == stats.pages
        and not backend._active_requests
    )


@pytest.fixture
def go_on(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set the engine makes ten steps: however seldom other threads run, no long answer
    ends before.
    """
    advance, steps, event = backend._async_llm.llm.step, itertools.count(), threading.Event()

    def blocked(running: Any) -> Any:
        if next(steps) >= 10:
            event.wait(TIMEOUT_SECONDS)
        return advance(running)

    monkeypatch.setattr(backend._async_llm.llm, "step", blocked)
    return event


def test_a_client_that_says_nothing_gets_openais_defaults(backend: TritonBackend) -> None:
    """Of an engine whose checkpoint says nothing."""
    language = backend._async_llm.llm.language
    options = language.request("Once").request.params
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (1.0, 1.0, 0, 0.0)
    assert language.generation_defaults.source == "openai"


def test_the_same_text_as_the_class(backend: TritonBackend, llm: LLM) -> None:
    prompts = [*STORY_STARTS] * 4
    expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40), progress=False)
    requests = [
        Request(text_input=prompt, stream=place % 2 == 0, **GREEDY)
        for place, prompt in enumerate(prompts)
    ]
    for request in requests:
        assert backend.execute([request]) is None
    for request, answer, place in zip(requests, expected, range(32), strict=True):
        text, ids, finish, count = request.answer()
        output = answer.outputs[0]
        assert (text, ids, finish) == (output.text, output.token_ids, output.finish_reason)
        assert count == (1 if place % 2 else len(ids))
    wait_until(lambda: idle(backend))


def test_counters_are_those_of_the_answers(backend: TritonBackend) -> None:
    """Tokens that a stop string ended, and prompts that were found in the cache."""
    wait_until(lambda: idle(backend))
    loop, before = backend._async_llm.llm.engine_core, backend._async_llm.llm.engine_core.stats()
    stops: list[dict[str, Any]] = [{}, {"stop": ["e"]}, {"stop": [" the", "."]}, {"max_tokens": 1}]
    requests = [
        Request(text_input="Once upon a time there was", **{**GREEDY, **stops[i % 4]})
        for i in range(16)
    ]
    backend.execute(requests)
    written = sum(len(request.answer()[1]) for request in requests)
    wait_until(lambda: idle(backend))
    after = loop.stats()
    assert after.output_tokens - before.output_tokens == written
    prompt = len(backend._async_llm.llm.tokenizer.encode("Once upon a time there was"))  # type: ignore[union-attr]
    assert after.prompt_tokens - before.prompt_tokens == 16 * prompt
    wait_until(
        lambda: backend._metrics._last_values["generation_tokens_total"] == after.output_tokens
    )


def test_every_source_and_seeded_sampling(backend: TritonBackend, llm: LLM) -> None:
    ids = llm.tokenizer.encode("Once upon")  # type: ignore[union-attr]
    options = {
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 5,
        "max_tokens": 20,
        "repetition_penalty": 1.1,
    }
    expected = (
        llm.generate("Once upon", SamplingParams(**options), progress=False)[0].outputs[0].text
    )  # type: ignore[arg-type]
    messages = [{"role": "user", "content": "Tell me a story"}]
    texts = (
        llm.chat(messages, SamplingParams(temperature=0, max_tokens=20), progress=False)[0]
        .outputs[0]
        .text
    )
    requests = [
        Request(text_input="Once upon", **options),
        Request(input_ids=ids, cache_salt="mine", **options),
        Request(messages=json.dumps(messages), temperature=0.0, max_tokens=20),
        Request(text_input="Once upon a time", stop=["was"], stream=True, **GREEDY),
    ]
    backend.execute(requests)
    assert [request.answer()[0] for request in requests[:3]] == [expected, expected, texts]
    assert requests[3].answer()[::2] == (", there ", "stop")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "give one of text_input, messages and input_ids, not none of them"),
        ({"text_input": "a", "input_ids": [1]}, "not text_input and input_ids"),
        (
            {"text_input": "a", "temperature": -1.0},
            "temperature must be between 0 and 100, not -1.0",
        ),
        ({"text_input": "a", "temperature": float("nan")}, "temperature must be a finite number"),
        ({"text_input": "a", "max_tokens": [1, 2]}, "max_tokens has 2 values; give one"),
        ({"text_input": ["a", "b"]}, "text_input has 2 values; give one"),
        ({"text_input": b"\xff\xfe"}, "text_input is not UTF-8"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"input_ids": [999999]}, "token ids must be between 0 and"),
        ({"messages": "{"}, "messages must be a JSON list"),
        ({"messages": "[]"}, "messages must be a JSON list"),
        ({"messages": "[1]"}, "messages must be a JSON list"),
        ({"messages": "[" * 100000}, "messages must be a JSON list"),
        ({"messages": '[{"role": "user"}]', "cache_salt": "x"}, "cache_salt belongs to"),
        ({"text_input": "a " * 500_000}, "shorten it"),
        ({"text_input": "a", "stop": [""]}, "stop takes up to"),
    ],
)
def test_mistakes_are_one_clear_line(
    backend: TritonBackend, fields: dict[str, Any], expected: str
) -> None:
    request = Request(**fields)
    backend.execute([request])
    with pytest.raises(Refused) as refused:
        request.answer()
    message, code = refused.value.args
    assert expected in message
    assert "\n" not in message
    assert "/" not in message, "a path of the server"
    assert code == TritonError.INVALID_ARG
    wait_until(lambda: idle(backend))


def test_who_leaves_frees_his_pages(backend: TritonBackend, go_on: threading.Event) -> None:
    requests = [
        Request(text_input="Once upon a time", stream=True, ignore_eos=True, max_tokens=400)
        for _ in range(24)
    ]
    backend.execute(requests)
    wait_until(lambda: not all(request.sender.sent.empty() for request in requests))
    for request in requests:
        request.sender.cancelled = True
    wait_until(lambda: all(request.sender.ended for request in requests))
    go_on.set()
    for request in requests:
        with pytest.raises(Refused) as refused:
            request.answer()
        assert refused.value.args[1] == TritonError.CANCELLED
    wait_until(lambda: idle(backend))
    wait_until(lambda: fake_triton_utils.MetricFamily.page["modelmill:num_requests_running"] == 0)
    wait_until(lambda: fake_triton_utils.MetricFamily.page["modelmill:kv_cache_usage_perc"] == 0)
    stats = backend._async_llm.llm.engine_core.stats()
    wait_until(
        lambda: (
            fake_triton_utils.MetricFamily.page["modelmill:generation_tokens_total"]
            == stats.output_tokens
        )
    )


def test_more_than_may_wait_are_refused(backend: TritonBackend, go_on: threading.Event) -> None:
    requests = [
        Request(text_input="Once", stream=False, ignore_eos=True, max_tokens=100) for _ in range(80)
    ]
    backend.execute(requests)
    wait_until(lambda: sum(request.sender.ended for request in requests) == 80 - 64)
    go_on.set()
    codes = []
    for request in requests:
        try:
            request.answer()
        except Refused as error:
            codes.append(error.args[1])
    assert codes == [TritonError.UNAVAILABLE] * (80 - 64)


def test_a_bug_tells_nothing(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("secret words of a prompt")

    monkeypatch.setattr(backend._async_llm.llm.language, "request", broken)
    request = Request(text_input="a")
    backend.execute([request])
    with pytest.raises(Refused) as refused:
        request.answer()
    assert refused.value.args[1] == TritonError.INTERNAL
    assert "secret" not in refused.value.args[0] + "".join(fake_triton_utils.Logger.lines)
    assert "RuntimeError" in fake_triton_utils.Logger.lines[-1]


def test_closing_ends_what_runs(repository: Path) -> None:
    backend = open_backend(repository)
    request = Request(text_input="Once", stream=True, ignore_eos=True, max_tokens=400)
    backend.execute([request])
    request.sender.sent.get(timeout=TIMEOUT_SECONDS)
    backend.close()
    assert request.sender.ended


def test_what_cannot_be_opened_is_triton_s_exception(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(fake_triton_utils.TritonModelException, match="2 instances on the host"):
        open_backend(repository, instance_group=[{"count": 2, "kind": "KIND_CPU"}])
    with pytest.raises(fake_triton_utils.TritonModelException, match=r"start\.json cannot be read"):
        open_backend(tmp_path)


def test_one_instance_a_device() -> None:
    check_one_instance_per_device(
        {"instance_group": [{"kind": "KIND_GPU", "count": 1, "gpus": [0, 1]}]}
    )
    check_one_instance_per_device(
        {"instance_group": [{"kind": "KIND_GPU", "gpus": [0]}, {"kind": "KIND_GPU", "gpus": [1]}]}
    )
    check_one_instance_per_device({})
    with pytest.raises(UsageError, match="2 instances on GPU 1"):
        check_one_instance_per_device(
            {
                "instance_group": [
                    {"kind": "KIND_GPU", "gpus": [0, 1]},
                    {"kind": "KIND_GPU", "gpus": [1]},
                ]
            }
        )
    with pytest.raises(UsageError, match="set count to 1"):
        check_one_instance_per_device({"instance_group": [{"kind": "KIND_MODEL", "count": 3}]})


def test_triton_s_device_is_taken() -> None:
    gpu = {"model_instance_kind": "GPU", "model_instance_device_id": "3"}
    assert with_triton_device(RunConfig(), gpu).device == "cuda:3"
    assert with_triton_device(RunConfig(), {**gpu, "model_instance_kind": "CPU"}).device == "cpu"
    assert (
        with_triton_device(
            RunConfig(device="cuda:1"), {**gpu, "model_instance_kind": "MODEL"}
        ).device
        == "cuda:1"
    )


@pytest.mark.parametrize(
    "name", ["", "/opt/tritonserver/backends/python/triton_python_backend_stub"]
)
def test_ranks_are_started_with_python(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys, "executable", name)
    set_python_executable()
    assert Path(sys.executable).name.startswith("python")
    assert Path(sys.executable).is_file()


def test_numbers_of_32_bits_mean_what_was_typed() -> None:
    import numpy

    tensors = {
        "text_input": numpy.array([b"a"], dtype=object),
        "temperature": numpy.array([0.7], dtype=numpy.float32),
    }
    assert parse_request(tensors).params.temperature == 0.7
    with pytest.raises(RequestError):
        parse_request({**tensors, "top_p": numpy.array([1.5], dtype=numpy.float32)})
