"""Sleep and wake_up: an idle engine gives its memory back and takes it again (vLLM's level 1).

The weights go to host memory, pinned on a GPU, and the KV cache is dropped, so that the prefix
cache is empty afterwards. All addresses stay (``loader.sleepable_memory``): CUDA graphs are not
captured again. With several ranks each offloads its own shard.
"""

from __future__ import annotations

import time

import torch

from modelmill.core.errors import CapacityError, UsageError
from modelmill.core.types import SleepOrWakeReport
from modelmill.loader.sleepable_memory import SleepableMemory
from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.model_runner import ModelRunner
from modelmill.runtime.tp_worker_pool import SLEEP_COMMAND, WAKE_UP_COMMAND, WorkerCommand


def sleep(core: EngineCore) -> SleepOrWakeReport:
    """Offload the weights and drop the KV cache; calling it again does nothing.

    Args:
        core: with ``enable_sleep_mode``.

    Raises:
        UsageError: the engine core is without sleep mode, or has requests.
        CapacityError: the host has not enough memory; the engine goes on.
        RankError: another rank has ended.
    """
    memory = _require_sleepable_memory(core)
    while core.has_work and not core.output_processor.live_sequences:
        core.step()  # one that was launched ahead in vain
    if core.has_work:
        raise UsageError("the engine has requests; it can sleep once they have ended")
    started = time.perf_counter()
    if not memory.is_asleep:
        _run_on_all_ranks(core, SLEEP_COMMAND)
        core.scheduler.clear_prefix_cache()
    return _make_sleep_report(core, started)


def wake_up(core: EngineCore) -> SleepOrWakeReport:
    """Take memory for weights and KV cache again; does nothing to an engine that is awake.

    Raises:
        UsageError: the engine core is without sleep mode.
        CapacityError: the GPU is full; the engine still sleeps.
        RankError: another rank has ended.
    """
    memory = _require_sleepable_memory(core)
    started = time.perf_counter()
    if memory.is_asleep:
        _run_on_all_ranks(core, WAKE_UP_COMMAND)
    return _make_sleep_report(core, started)


def run_sleep_or_wake_command(runner: ModelRunner, command: str) -> None:
    """Let this rank sleep or wake up."""
    assert runner.memory is not None, "all ranks have the same configuration"
    if command == SLEEP_COMMAND:
        runner.memory.sleep()
    else:
        runner.memory.wake_up()


def _require_sleepable_memory(core: EngineCore) -> SleepableMemory:
    if core.model_runner.memory is None:
        raise UsageError("the engine was opened without sleep mode; give enable_sleep_mode")
    return core.model_runner.memory


def _run_on_all_ranks(core: EngineCore, command: str) -> None:
    runner, workers = core.model_runner, core.model_runner.tp_workers
    if command == SLEEP_COMMAND:
        run_sleep_or_wake_command(runner, command)  # first: if the host is full, no rank sleeps
    with runner.translate_rank_errors():
        if workers is not None:
            workers.broadcast(WorkerCommand(command))
    if command == WAKE_UP_COMMAND:
        try:
            run_sleep_or_wake_command(runner, command)
        except CapacityError as error:
            if workers is not None:  # the others are awake
                workers.fail_and_kill_workers(
                    f"rank 0 cannot wake up: {error}; open the engine again"
                )
            raise
    core.ping_tp_workers()  # the others are done, too


def _make_sleep_report(core: EngineCore, started: float) -> SleepOrWakeReport:
    runner = core.model_runner
    assert runner.memory is not None, "it was checked"
    seconds, ranks = time.perf_counter() - started, runner.tp_group.size
    left = 0 if core.device == "cpu" else torch.cuda.memory_reserved(core.device)
    return SleepOrWakeReport(seconds, ranks * runner.memory.host_bytes, ranks * left)
