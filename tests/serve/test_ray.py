"""Two replicas behind Ray Serve on this machine, called by OpenAI's client.

``make test-ray`` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from modelmill.core.types import SamplingParams
from modelmill.llm import LLM
from tests.serve.server_process import ServerProcess, read_all
from tests.stories import STORY_STARTS
from tests.wait import TIMEOUT_SECONDS, wait_until

pytestmark = pytest.mark.ray
TOKENS = 60
LONG = {"model": "stories", "prompt": "Once", "max_tokens": 450, "ignore_eos": True, "stream": True}


class Cluster(ServerProcess):
    """``modelmill serve --ray`` with two replicas."""

    def __init__(self, engine: Path, *words: object) -> None:
        if importlib.util.find_spec("ray") is None:
            pytest.skip("needs ray[serve]: run it with make test-ray")
        super().__init__(engine, "--ray", "--replicas", 2, *words, ready=False)
        self.wait_for_replicas()

    def __exit__(self, *parts: object) -> None:
        children = (
            psutil.Process(self.process.pid).children(recursive=True)
            if self.process.poll() is None
            else []
        )
        super().__exit__(*parts)
        assert_gone(children)

    def wait_for_replicas(self, seconds: float = 240) -> None:
        """Wait until both replicas run and Ray Serve has nothing left to do."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.finish()[1]
            body = self.request("/health")[1]
            if body["replicas"]["running"] == 2 and body.get("serve") == "RUNNING":
                return
            time.sleep(0.1)
        raise AssertionError(body)

    @property
    def replicas(self) -> list[psutil.Process]:
        replicas = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one of these, too
                if " ".join(child.cmdline()).startswith("ray::ServeReplica"):
                    replicas.append(child)
        return replicas

    def counters(self, name: str) -> dict[str, float]:
        """One number of each replica's metrics."""
        page = self.request("/metrics")[1]
        samples = re.findall(
            rf'^modelmill:{name}\{{[^}}]*replica="(\w+)"[^}}]*\}} (\S+)$', page, re.MULTILINE
        )
        return {replica: float(value) for replica, value in samples}

    def idle(self, seconds: float = TIMEOUT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while time.monotonic() < deadline:
            counters = [self.counters(name) for name in names]
            if all(len(each) == 2 and not any(each.values()) for each in counters):
                return
            time.sleep(0.1)
        raise AssertionError(counters)


def assert_gone(processes: list[psutil.Process], seconds: float = TIMEOUT_SECONDS) -> None:
    _, left = psutil.wait_procs(processes, timeout=seconds)
    assert not left, left


@dataclass
class Load:
    """Clients that ask one thing after another, and what became of it."""

    url: str
    expected: dict[str, str]
    complete: int = 0
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    over: bool = False

    async def client(self, api: openai.AsyncOpenAI, number: int) -> None:
        prompts = list(self.expected)
        turn = number
        while not self.over:
            prompt = prompts[turn % len(prompts)]
            try:
                text, finish = await self._ask(api, prompt, stream=turn % 2 == 0)
            except openai.OpenAIError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.05)
            else:
                if (text, finish) == (self.expected[prompt], "length"):
                    self.complete += 1
                else:
                    self.wrong.append(f"{prompt!r} {finish} {text!r}")
            turn += 1

    async def _ask(
        self, api: openai.AsyncOpenAI, prompt: str, stream: bool
    ) -> tuple[str, str | None]:
        options: Any = {
            "model": "stories",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": TOKENS,
            "extra_body": {"ignore_eos": True},
        }
        if not stream:
            choice = (await api.completions.create(**options)).choices[0]
            return choice.text, choice.finish_reason
        text, finish = "", None
        async for chunk in await api.completions.create(**options, stream=True):
            text += chunk.choices[0].text
            finish = chunk.choices[0].finish_reason or finish
        return text, finish

    async def run(self, meanwhile: Any, clients: int = 12) -> None:
        """Clients send requests until ``meanwhile`` has returned; all responses are awaited."""
        async with openai.AsyncOpenAI(
            base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=120
        ) as api:
            tasks = [asyncio.create_task(self.client(api, number)) for number in range(clients)]
            try:
                await asyncio.to_thread(meanwhile)
            finally:
                self.over = True
                await asyncio.gather(*tasks)


@pytest.fixture(scope="module")
def cluster(stories: Path) -> Iterator[Cluster]:
    with Cluster(stories) as running:
        yield running


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[str, str]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    answers = llm.generate(list(STORY_STARTS), params, progress=False)
    return {
        start: answer.outputs[0].text for start, answer in zip(STORY_STARTS, answers, strict=True)
    }


def test_the_text_of_the_class_from_both(cluster: Cluster, expected: dict[str, str]) -> None:
    load = Load(cluster.url, expected)
    asyncio.run(load.run(lambda: wait_until(lambda: load.complete >= 64, 240)))
    assert not load.errors
    assert not load.wrong
    counts = cluster.counters("generation_tokens_total")
    assert sum(counts.values()) == load.complete * TOKENS
    assert min(counts.values()) >= 0.25 * max(counts.values())
    cluster.idle()


def test_requests_of_one_beginning_go_to_the_replica_that_has_it(cluster: Cluster) -> None:
    before = cluster.counters("prefix_cache_hits_total")
    prompt_tokens = cluster.counters("prompt_tokens_total")
    for messages in range(2):
        start = f"{messages} said: " + "The miller of the old mill was a big man. " * 8
        for turn in range(6):
            body = {"model": "stories", "prompt": f"{start} {turn}", "max_tokens": 1}
            status, answer, headers = cluster.request(
                "/v1/completions", body, **{"X-Request-Id": f"t{messages}-{turn}"}
            )
            assert (status, headers["x-request-id"]) == (200, f"t{messages}-{turn}")
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert bool(cached) == bool(turn), "another replica got the request"
    hits, prompts = (
        cluster.counters("prefix_cache_hits_total"),
        cluster.counters("prompt_tokens_total"),
    )
    # and each of the two beginnings has a replica of its own
    assert all(hits[name] > before[name] and prompts[name] > prompt_tokens[name] for name in hits)


def test_refusals_come_through(cluster: Cluster) -> None:
    assert (
        cluster.request("/v1/completions", {"model": "gpt", "prompt": "a"})[1]["error"]["code"]
        == "model_not_found"
    )
    assert (
        cluster.request("/v1/completions", {"model": "stories", "prompt": "a", "temperature": 3})[0]
        == 400
    )
    assert cluster.request("/nothing")[0] == 404
    assert cluster.request("/v1/models")[1]["data"][0]["id"] == "stories"


def test_who_can_reach_it(cluster: Cluster) -> None:
    """Everything is on the loopback interface but one port a replica, Ray Serve's own, which wants
    Ray's token.
    """
    import grpc
    from ray.serve.generated.serve_pb2 import ASGIRequest
    from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

    wide = []
    for each in (
        psutil.Process(cluster.process.pid),
        *psutil.Process(cluster.process.pid).children(recursive=True),
    ):
        with contextlib.suppress(psutil.NoSuchProcess):
            listening = [
                connection
                for connection in each.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            ]
            wide += [
                connection.laddr.port
                for connection in listening
                if "127.0.0.1" not in connection.laddr.ip
            ]
    assert len(wide) == 2
    for port in wide:
        with (
            grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
            pytest.raises(grpc.RpcError) as refused,
        ):
            ASGIServiceStub(channel).HandleRequest(
                ASGIRequest(pickled_request_metadata=b"anything"), timeout=30
            )
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_clients_that_leave_free_the_pages(cluster: Cluster) -> None:
    before = sum(cluster.counters("generation_tokens_total").values())
    socks = [cluster.start_post("/v1/completions", LONG) for _ in range(16)]
    for sock in socks:
        sock.recv(1)
        sock.close()
    cluster.idle()
    assert sum(cluster.counters("generation_tokens_total").values()) - before < 16 * 450


def test_a_replica_is_killed_under_load(cluster: Cluster, expected: dict[str, str]) -> None:
    """Every request is answered whole or with an error; the service goes on and heals."""
    load = Load(cluster.url, expected)
    victim = cluster.replicas[0]
    others = victim.children(recursive=True)
    broken: list[int] = []

    def kill() -> None:
        wait_until(lambda: load.complete >= 24, 240)
        socks = [cluster.start_post("/v1/completions", {**LONG, "n": 4}) for _ in range(16)]
        heads = [sock.recv(1 << 10) for sock in socks]
        victim.kill()
        for head, sock in zip(heads, socks, strict=True):
            counters = head + read_all(sock)
            sock.close()
            done, lost = counters.count(b"data: [DONE]"), counters.count(b'"code":"replica_lost"')
            assert done + lost == 1, counters[-300:]
            assert lost or counters.count(b'"finish_reason":"length"') == 4
            broken.append(lost)
        assert_gone([victim, *others])
        wait_until(
            lambda: (
                victim.pid not in [each.pid for each in cluster.replicas]
                and len(cluster.replicas) == 2
            ),
            240,
        )
        cluster.wait_for_replicas()
        done = load.complete
        wait_until(lambda: load.complete >= done + 24, 240)

    asyncio.run(load.run(kill))
    print(f"{sum(broken)} of 16 streams ended with an error, the others whole")
    assert sum(broken), "the replica that was killed had something to answer"
    print(f"{load.complete} whole, {len(load.errors)} errors: {sorted(set(load.errors))}")
    assert not load.wrong, "a lost answer must be an error"
    assert all(
        "ended during the response" in error or "replica" in error for error in load.errors
    ), load.errors
    assert len(load.errors) <= 12
    cluster.idle()


def test_an_engine_s_process_is_killed(cluster: Cluster, expected: dict[str, str]) -> None:
    load = Load(cluster.url, expected)

    def kill() -> None:
        wait_until(lambda: load.complete >= 12, 240)
        workers = [each for replica in cluster.replicas for each in replica.children() if "modelmill.serve.worker" in  # noqa: E501
                   each.cmdline()]  # fmt: skip
        assert len(workers) == 2
        workers[0].kill()
        assert_gone([workers[0]])
        done = load.complete
        wait_until(lambda: load.complete >= done + 36, 240)

    asyncio.run(load.run(kill))
    assert not load.wrong
    assert len(load.errors) <= 12
    cluster.wait_for_replicas()


def test_replicas_are_replaced_one_after_another(
    cluster: Cluster, expected: dict[str, str]
) -> None:
    """SIGHUP under load: new processes afterwards, and no request fails."""
    load = Load(cluster.url, expected)
    before = {each.pid for each in cluster.replicas}

    def roll() -> None:
        wait_until(lambda: load.complete >= 12, 240)
        cluster.process.send_signal(signal.SIGHUP)
        wait_until(lambda: not before & {each.pid for each in cluster.replicas}, 240)
        cluster.wait_for_replicas()
        done = load.complete
        wait_until(lambda: load.complete >= done + 12, 240)

    asyncio.run(load.run(roll))
    print(f"{load.complete} whole while both were replaced")
    assert not load.errors
    assert not load.wrong


def test_sigterm_lets_answers_finish_and_leaves_nothing(stories: Path) -> None:
    with Cluster(stories) as cluster:
        children = psutil.Process(cluster.process.pid).children(recursive=True)
        sock = cluster.start_post("/v1/completions", LONG)
        received = sock.recv(1)
        cluster.process.send_signal(signal.SIGTERM)
        while part := sock.recv(1 << 16):
            received += part
        sock.close()
        assert received.count(b"data: [DONE]") == 1
        assert cluster.finish()[0] == 0
        assert_gone(children)


def test_a_front_that_is_killed_leaves_nothing(stories: Path) -> None:
    with Cluster(stories) as cluster:
        children = psutil.Process(cluster.process.pid).children(recursive=True)
        processes = [
            each
            for each in children
            if "modelmill" in " ".join(each.cmdline()) or "Replica" in each.name()
        ]
        assert len(processes) >= 2
        cluster.process.kill()
        assert_gone(processes, 60)
        # Ray looks only now and then whether its own are still wanted
        assert_gone(children, 180)
