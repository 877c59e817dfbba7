"""Several processes compute one model: the same answers as one, and none outlives another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.errors import MissingDependency, RankError, UsageError
from modelmill.core.types import LAST_TOKEN_POOLING, MEAN_POOLING, Request
from modelmill.llm import build_engine
from modelmill.loader.device import rank_devices
from modelmill.runtime.batch_buffer_layout import BatchBufferLayout
from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.tp_worker_pool import (
    COMMANDS,
    COPY_PAGES_COMMAND,
    HEADER_BYTES,
    TPWorkerPool,
    WorkerCommand,
)
from tests.runtime import tiny
from tests.wait import TIMEOUT_SECONDS, time_limit, wait_until

pytestmark = pytest.mark.usefixtures("ended_ranks")
ROOT = Path(__file__).resolve().parent.parent.parent
COUNTS = st.integers(0, 1 << 40)
LAYOUTS = st.builds(
    BatchBufferLayout, COUNTS, COUNTS, COUNTS, COUNTS, st.booleans(), st.integers(1, 8)
)
COMMANDS_SENT = st.builds(
    WorkerCommand,
    st.sampled_from(COMMANDS),
    COUNTS,
    LAYOUTS,
    st.booleans(),
    COUNTS,
    COUNTS,
    st.booleans(),
    COUNTS,
    COUNTS,
    COUNTS,
    st.integers(-1, 1000),
)


def open_engine(engine: Path, tp: int, **more: Any) -> EngineCore:
    options = {
        "threads": 1,
        "kv_cache_bytes": 1 << 21,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
        **more,
    }
    return EngineCore.open(engine, RunConfig(device="cpu", tp=tp, page_size=8, **options))


def work(vocab: int) -> list[Request]:
    params_list = [
        tiny.params(max_tokens=14),
        tiny.params(temperature=0.9, seed=3, top_p=0.9, max_tokens=10),
        tiny.params(n=3, temperature=1.0, seed=1, max_tokens=8),
        tiny.params(num_beams=3, n=2, max_tokens=6),
        tiny.params(repetition_penalty=1.3, max_tokens=10, logprobs=1),
        tiny.params(max_tokens=20),
    ]
    prompts = tiny.prompts(len(params_list), 1, 60, vocab=vocab)
    return [
        Request(id=str(i), prompt=p, params=h, eos_ids=(1,))
        for i, (p, h) in enumerate(zip(prompts, params_list))
    ]


def run_requests(engine_core: EngineCore) -> dict[tuple[str, int], tuple[int, ...]]:
    """Everything at once, then the first request again, from cached pages."""
    outputs = tiny.run(engine_core, work(engine_core.vocab))
    again = tiny.run(engine_core, [replace(work(engine_core.vocab)[-1], id="again")])
    assert again["again", 0] == outputs["5", 0]
    return outputs


def scored(engine_core: EngineCore) -> torch.Tensor:
    """Logits of a short sequence: two tokens as a prompt, two decoded."""
    return TeacherForcedScorer(engine_core).compute_logits([[5, 6, 7, 8]], decode_from=2)[0]


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("llama", 2),
        ("gpt2", 3),
        ("qwen2-tied-int8", 2),
        ("qwen3_5_text", 2),
        ("gemma2", 2),
        ("gemma4_text", 2),
    ],
)
def test_the_same_answers_as_one(engines: Callable[[str], Path], name: str, tp: int) -> None:
    alone = open_engine(engines(name), 1)
    assert bool(alone.kv_shape.groups) == (name in ("gemma2", "gemma4_text"))
    expected = run_requests(alone)
    logits = scored(alone)
    engine_core = open_engine(engines(name), tp)
    try:
        # as on a GPU: sampled ids stay on the device, on every rank, for a step that is launched
        # before they are read
        engine_core._overlap = engine_core.model_runner.keep_last_ids = True
        assert run_requests(engine_core) == expected
        torch.testing.assert_close(scored(engine_core), logits, rtol=1e-4, atol=1e-4)
        with pytest.raises(UsageError, match="use --tp 1"):
            TeacherForcedScorer(engine_core).record_module_outputs([[5, 6]])
    finally:
        engine_core.close()


@pytest.mark.parametrize(("name", "tp"), [("mixtral", 2), ("gpt_oss", 2), ("mixtral-int8", 3)])
def test_the_same_answers_with_whole_experts_on_each_rank(
    engines: Callable[[str], Path], name: str, tp: int
) -> None:
    """5 experts over 2 or 3 ranks: most steps have a rank without any of the chosen ones."""
    alone = open_engine(engines(name), 1)
    expected = run_requests(alone)
    logits = scored(alone)
    engine_core = open_engine(engines(name), tp, enable_expert_parallel=True)
    try:
        assert alone.num_experts_by_rank == ()
        assert engine_core.num_experts_by_rank == ((3, 2) if tp == 2 else (2, 2, 1))
        assert run_requests(engine_core) == expected
        torch.testing.assert_close(scored(engine_core), logits, rtol=1e-4, atol=1e-4)
    finally:
        engine_core.close()


def test_a_model_without_experts_is_refused_before_ranks_start(
    engines: Callable[[str], Path],
) -> None:
    with (
        mock.patch.object(TPWorkerPool, "__init__", side_effect=AssertionError("started")),
        pytest.raises(UsageError, match=r"^--enable-expert-parallel: the model has no experts"),
    ):
        open_engine(engines("llama"), 2, enable_expert_parallel=True)


@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("gpt2", 3)])
def test_embeddings_beside_answers(engines: Callable[[str], Path], name: str, tp: int) -> None:
    """Other ranks read the head for the same rows as rank 0, or not at all."""
    embeddings: list[dict[str, np.ndarray]] = []
    for ranks in (1, tp):
        engine_core = open_engine(engines(name), ranks)
        try:
            todo = [
                Request(
                    id=f"{options}{i}",
                    prompt=prompt,
                    params=tiny.params(max_tokens=0),
                    pooling=options,
                )
                for options in (MEAN_POOLING, LAST_TOKEN_POOLING)
                for i, prompt in enumerate(tiny.prompts(4, 1, 60, vocab=engine_core.vocab))
            ]
            for request in (*todo[:4], *work(engine_core.vocab)[:2], *todo[4:]):
                engine_core.add(request)
            events = tiny.drain(engine_core)
            embeddings.append(
                {
                    e.request_id: np.frombuffer(e.embedding, "<f4")
                    for e in events
                    if e.embedding is not None
                }
            )
        finally:
            engine_core.close()
    assert len(embeddings[0]) == 8
    assert embeddings[0].keys() == embeddings[1].keys()
    for name, value in embeddings[0].items():
        np.testing.assert_allclose(embeddings[1][name], value, rtol=1e-4, atol=1e-4, err_msg=name)


def test_few_pages_are_copied_on_every_rank(engines: Callable[[str], Path]) -> None:
    """Preemption, and forks that write into shared pages."""
    few = {"max_model_len": 96, "kv_cache_bytes": 1 << 17}
    expected = run_requests(open_engine(engines("llama"), 1, **few))
    engine_core = open_engine(engines("llama"), 2, **{**few, "kv_cache_bytes": 1 << 16})
    commands = []
    workers: Any = engine_core.model_runner.tp_workers

    def record_and_send(command: WorkerCommand, payload: bytes) -> None:
        commands.append(command.command)
        send(command, payload)

    send, workers.broadcast = workers.broadcast, record_and_send
    assert run_requests(engine_core) == expected
    assert COPY_PAGES_COMMAND in commands
    engine_core.close()


@pytest.mark.slow
@pytest.mark.parametrize("tp", [4, 8])
def test_a_trained_model_on_many_ranks(shared: Path, tmp_path: Path, tp: int) -> None:
    """8 heads over 4 KV heads: with 8 ranks, two hold each KV head."""
    build_engine(
        shared / "data/models/stories260K",
        tmp_path / "e",
        BuildConfig(dtype="float32", target="cpu"),
        check=False,
        tune=False,
    )
    greedy = [tiny.params(max_tokens=24)] * 3
    outputs = []
    for ranks in (1, tp):
        engine_core = open_engine(tmp_path / "e", ranks)
        prompts = tiny.prompts(3, 4, 20, vocab=engine_core.vocab)
        todo = [
            Request(id=str(i), prompt=p, params=h) for i, (p, h) in enumerate(zip(prompts, greedy))
        ]
        outputs.append(tiny.run(engine_core, todo))
        engine_core.close()
    assert outputs[0] == outputs[1]


def endless(engine_core: EngineCore) -> None:
    engine_core.add(
        Request(id="long", prompt=(3, 4, 5), params=tiny.params(max_tokens=200, ignore_eos=True))
    )


def check_killed_rank_is_reported(engine_core: EngineCore, rank: str, after_steps: int) -> Any:
    """Kill the last rank, e.g. "2 of 3", amid an answer; the rank workers, which have failed."""
    endless(engine_core)
    for _ in range(after_steps):
        engine_core.step()
    workers: Any = engine_core.model_runner.tp_workers
    workers._processes[-1].kill()
    message = f"^rank {rank} was killed by signal 9; open the engine again$"
    with time_limit(), pytest.raises(RankError, match=message):
        tiny.drain(engine_core)
    return workers


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_is_one_clear_error(engines: Callable[[str], Path], ranks: int) -> None:
    engine_core = open_engine(engines("llama"), ranks)
    rank = f"{ranks - 1} of {ranks}"
    workers = check_killed_rank_is_reported(engine_core, rank, after_steps=4)
    with pytest.raises(RankError, match=f"rank {rank}"):
        engine_core.step()
    with pytest.raises(RankError, match=f"rank {rank}"):
        TeacherForcedScorer(engine_core).compute_logits([[1, 2]])
    engine_core.close()
    assert all(process.poll() is not None for process in workers._processes)


def test_the_last_output_of_a_rank_is_reported(engines: Callable[[str], Path]) -> None:
    """An order that no rank can carry out: the error comes back as one line."""
    engine_core = open_engine(engines("llama"), 2)
    workers: Any = engine_core.model_runner.tp_workers
    workers.broadcast(
        WorkerCommand(COPY_PAGES_COMMAND, 2), torch.tensor([0, 1 << 40]).numpy().data.cast("B")
    )
    with pytest.raises(RankError, match=r"^rank 1 of 2 ended: [^\n]+; open the engine again$"):
        workers.raise_if_failed(TIMEOUT_SECONDS)
    engine_core.close()


def test_rank_0_may_be_killed(engines: Callable[[str], Path], tmp_path: Path) -> None:
    """The others notice, in the middle of a step too, and leave."""
    code = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.runtime.test_tp_worker_pool import endless, open_engine
engine_core = open_engine(Path({str(engines("llama"))!r}), 3)
print(*[p.pid for p in engine_core.model_runner.tp_workers._processes], flush=True)
while True:
    endless(engine_core)
    while engine_core.has_work:
        engine_core.step()
"""
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    pids = [int(word) for word in caller.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.2)
    caller.kill()
    caller.wait()
    caller.stdout.close()
    wait_until(lambda: not any(_alive(pid) for pid in pids))


def _alive(pid: int) -> bool:
    """Whether the process runs: it has not ended and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_forgotten_loops_leave_no_processes(engines: Callable[[str], Path]) -> None:
    engine_core = open_engine(engines("llama"), 2)
    workers: Any = engine_core.model_runner.tp_workers
    del engine_core
    assert all(process.poll() is not None for process in workers._processes)
    assert not workers._watcher.is_alive()
    workers.close()
    with pytest.raises(RankError, match=r"^the engine was closed$"):
        workers.raise_if_failed()


def test_what_cannot_be_split_is_one_line(engines: Callable[[str], Path]) -> None:
    with pytest.raises(
        UsageError, match=r"^--tp 5: the model has 4 attention heads; use --tp 4 or less$"
    ):
        open_engine(engines("llama"), 5)
    with pytest.raises(UsageError, match="--tp must be at least 1"):
        RunConfig(tp=0)
    with pytest.raises(MissingDependency, match=r"^--tp 2 needs 2 GPUs from cuda:98 on"):
        rank_devices("cuda:98", 2)


def test_a_killed_rank_while_loading(
    engines: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelmill.runtime import engine_core as module

    def die(*_: object) -> None:
        os.kill(started[0]._processes[0].pid, signal.SIGKILL)

    started: list[Any] = []
    made = module.TPWorkerPool

    def note(*args: Any) -> Any:
        started.append(made(*args))
        return started[0]

    monkeypatch.setattr(module, "TPWorkerPool", note)
    monkeypatch.setattr(module, "verify_file_hashes", die)
    with pytest.raises(RankError, match="rank 1 of 2 was killed by signal 9"):
        open_engine(engines("llama"), 2)


def on_gpus(engine: Path, tp: int, **more: Any) -> EngineCore:
    torch.backends.cuda.matmul.allow_tf32 = False
    options = {
        "kv_cache_bytes": 1 << 22,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
        "page_size": 8,
        **more,
    }
    return EngineCore.open(engine, RunConfig(device="cuda", tp=tp, **options))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("llama", 4), ("gpt2", 4)])
def test_the_same_answers_on_gpus(engines: Callable[[str], Path], name: str, tp: int) -> None:
    """In float32, with graphs: the same ids as on one GPU."""
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")
    options = {"max_num_batched_tokens": 128, "enable_prefix_caching": False}
    single = on_gpus(engines(name), 1, **options)
    prompts = tiny.prompts(24, 1, 60, seed=4, vocab=single.vocab)
    todo = tiny.requests(prompts, tiny.params(max_tokens=9))
    expected = run_requests(single), tiny.run(single, todo)
    engine_core = on_gpus(engines(name), tp, **options)
    tp_group: Any = engine_core.model_runner.tp_group
    assert tp_group.peer_buffers is not None, "sums go through NCCL"
    for _ in range(3):
        assert (run_requests(engine_core), tiny.run(engine_core, todo)) == expected
    runner = engine_core.model_runner
    assert runner.decode_graphs is not None
    assert runner.decode_graphs._graphs
    assert runner.prefill_graphs is not None
    assert any(size.is_mixed for size in runner.prefill_graphs._captured)
    engine_core.close()


@pytest.mark.gpu
def test_a_rank_killed_on_gpus(engines: Callable[[str], Path]) -> None:
    """A kernel that waits for a sum that never comes is released."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    engine_core = on_gpus(engines("llama"), 2)
    check_killed_rank_is_reported(engine_core, "1 of 2", after_steps=20)
    engine_core.close()
    torch.cuda.synchronize()
    # the GPU is free for another engine
    assert tiny.run(on_gpus(engines("llama"), 1), work(160)[:1])


@given(command=COMMANDS_SENT)
def test_orders_survive_the_way(command: WorkerCommand) -> None:
    header = command.pack()
    assert len(header) == HEADER_BYTES
    assert WorkerCommand.unpack(header) == command
