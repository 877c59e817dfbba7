"""Lets the engine of a worker sleep and wake up, between two steps."""

from __future__ import annotations

from modelmill.core.errors import ModelmillError, RankError
from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.sleep_mode import sleep, wake_up
from modelmill.serve.worker_messages import SleepEngine, SleepOrWakeReply, WakeEngine


def handle_sleep_message(core: EngineCore, message: SleepEngine | WakeEngine) -> SleepOrWakeReply:
    """Do what the message says, and report it.

    Raises:
        RankError: another rank has ended, which ends this worker.
    """
    try:
        report = sleep(core) if isinstance(message, SleepEngine) else wake_up(core)
    except RankError:
        raise
    except ModelmillError as error:
        return SleepOrWakeReply(message.number, error=str(error))
    return SleepOrWakeReply(message.number, report.host_bytes, report.device_bytes)
