"""An exported engine in a real Triton Inference Server, called by Triton's own client.

``make test-triton`` runs it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from modelmill.core.types import SamplingParams
from modelmill.export.triton_repository import EngineStartOptions, export_triton_repository
from modelmill.llm import LLM
from tests.export.triton_server import Server, find_triton_package
from tests.stories import STORY_STARTS

pytestmark = pytest.mark.triton

RUN = {"device": "cpu", "threads": 1, "kv_cache_bytes": 8 << 20, "max_num_seqs": 32}


@pytest.fixture(scope="module")
def server(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    find_triton_package()
    folder = tmp_path_factory.mktemp("triton")
    export_triton_repository(
        stories,
        folder / "repository",
        start_options=EngineStartOptions(run=RUN, chat_template="chatml"),
        copy=True,
    )
    with Server(folder / "repository", folder) as running:
        yield running


@pytest.fixture(scope="module")
def llm(stories: Path) -> LLM:
    return LLM(stories, chat_template="chatml", **RUN)


def inputs(**fields: Any) -> list[Any]:
    """Tensors of a request."""
    import numpy
    from tritonclient.grpc import InferInput

    from modelmill.export.triton_tensors import INPUT_TENSORS

    dtypes = {
        "STRING": numpy.object_,
        "INT32": numpy.int32,
        "INT64": numpy.int64,
        "FP32": numpy.float32,
    }
    made = []
    for field in INPUT_TENSORS:
        if field.name not in fields:
            continue
        value = fields[field.name]
        listed = value if isinstance(value, list) else [value]
        data_type = field.type.removeprefix("TYPE_")
        if data_type == "STRING":
            listed = [each.encode() for each in listed]
        array = numpy.array(listed, dtype=dtypes.get(data_type, numpy.bool_))
        tensor = InferInput(
            field.name, list(array.shape), {"STRING": "BYTES"}.get(data_type, data_type)
        )
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


class Answer:
    """What has come of a stream."""

    def __init__(self) -> None:
        self.text, self.finish, self.pieces, self.ids = "", "", 0, list[int]()

    def add(self, result: Any) -> None:
        self.text += result.as_numpy("text_output")[0].decode()
        self.ids += result.as_numpy("output_ids").tolist()
        self.finish = result.as_numpy("finish_reason")[0].decode()
        self.pieces += 1


async def generate(client: Any, most: int | None = None, **fields: Any) -> Answer:
    """Ask over a stream of its own, to the end; most: cancel after so many pieces."""

    async def one() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": "stories",
            "inputs": inputs(**fields),
            "enable_empty_final_response": True,
        }

    answer, stream = Answer(), client.stream_infer(one())
    async for result, error in stream:
        if error is not None:
            raise error
        if result.get_response().outputs:
            answer.add(result)
        if answer.finish:
            break
        if answer.pieces == most:
            stream.cancel()
            break
    return answer


def together(server: Server, *requests: dict[str, Any]) -> list[Answer]:
    """All requests at once, each on a stream of its own."""

    async def main() -> list[Answer]:
        from tritonclient.grpc.aio import InferenceServerClient

        async with InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
            return await asyncio.gather(*(generate(client, **request) for request in requests))

    return asyncio.run(main())


def test_thirty_two_streams_give_the_text_of_the_class(server: Server, llm: LLM) -> None:
    prompts = [f"{start} {word}" for start in STORY_STARTS for word in ("was", "had", "and", "saw")]
    expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64), progress=False)
    before = server.gauge("generation_tokens_total")
    replies = together(
        server,
        *(
            {"text_input": text, "stream": True, "temperature": 0.0, "max_tokens": 64}
            for text in prompts
        ),
    )
    assert [(each.text, each.ids, each.finish) for each in replies] == [
        (answer.outputs[0].text, answer.outputs[0].token_ids, answer.outputs[0].finish_reason)
        for answer in expected
    ]
    assert all(each.pieces == len(each.ids) for each in replies)
    server.wait_idle()
    assert server.gauge("generation_tokens_total") - before == sum(
        len(each.ids) for each in replies
    )


def test_seeds_conversations_ids_and_whole_answers(server: Server, llm: LLM) -> None:
    options = {
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": 40,
        "seed": 11,
        "max_tokens": 24,
        "stop": ["Tom", "."],
    }
    messages = [{"role": "user", "content": "Tell me a story"}]
    ids = llm.tokenizer.encode("One day")  # type: ignore[union-attr]
    params = SamplingParams(**options)  # type: ignore[arg-type]
    expected = [
        llm.generate("One day", params)[0],
        llm.generate("One day", params)[0],
        llm.chat(messages, params)[0],
    ]
    replies = together(
        server,
        {"input_ids": ids, **options},
        {"text_input": "One day", "stream": True, **options},
        {"messages": json.dumps(messages), **options},
    )
    assert [each.text for each in replies] == [answer.outputs[0].text for answer in expected]
    assert [each.finish for each in replies] == [
        answer.outputs[0].finish_reason for answer in expected
    ]
    assert [replies[0].pieces, replies[2].pieces] == [1, 1]


def test_cancelling_in_the_middle_frees_the_pages(server: Server) -> None:
    long = {"text_input": "Once upon a time", "stream": True, "ignore_eos": True, "max_tokens": 450}
    before = server.gauge("generation_tokens_total")
    replies = together(server, *({**long, "most": 3} for _ in range(32)))
    assert [each.pieces for each in replies] == [3] * 32
    server.wait_idle()
    # all of them, had it gone on; how many come before the cancelling does depends on how busy the
    # machine is
    assert server.gauge("generation_tokens_total") - before < 32 * 450 * 0.8, (
        "the engine continued without a client"
    )


def test_mistakes_are_errors_of_one_line(server: Server) -> None:
    from tritonclient.utils import InferenceServerException

    for fields, expected in (
        (
            {"text_input": "a", "temperature": -1.0},
            "temperature must be between 0 and 100, not -1.0",
        ),
        ({"text_input": "a", "input_ids": [1]}, "give one of text_input, messages and input_ids"),
        ({"input_ids": [10**6]}, "token ids must be between 0 and"),
        ({"text_input": "a " * 200_000}, "shorten it"),
    ):
        with pytest.raises(InferenceServerException) as refused:
            together(server, fields)
        message = refused.value.message()
        assert expected in message
        assert "\n" not in message
    server.wait_idle()


def test_over_plain_http(server: Server, llm: LLM) -> None:
    body = {"text_input": "Once upon a time", "max_tokens": 12, "temperature": 0}
    status, text = server.get(server.http, "/v2/models/stories/generate", json.dumps(body).encode())
    expected = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=12))[
        0
    ].outputs[0]
    assert status == 200
    assert json.loads(text)["text_output"] == expected.text
    body["stream"] = True
    events = server.get(
        server.http, "/v2/models/stories/generate_stream", json.dumps(body).encode()
    )[1]
    pieces = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")]
    assert "".join(piece["text_output"] for piece in pieces) == expected.text
    assert pieces[-1]["finish_reason"] == "length"


def test_two_instances_of_one_device_are_refused(stories: Path, tmp_path: Path) -> None:
    find_triton_package()
    made = export_triton_repository(
        stories, tmp_path / "repository", start_options=EngineStartOptions(run=RUN)
    )
    config = made / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", "count: 2"))
    with Server(tmp_path / "repository", tmp_path, ready=False) as server:
        server.process.wait(120)
        assert "2 instances on the host" in server.log()
