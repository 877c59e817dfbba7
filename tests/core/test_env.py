"""How OpenMP's threads wait: each entry point says it before torch is imported, and a user's own
word stands.

GNU's runtime tells its settings when it is loaded (OMP_DISPLAY_ENV): what is looked at is what is
in force.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from typing import Any

import pytest

from modelmill.core import env
from modelmill.serve import worker_process

LIBRARY = (
    "from modelmill import LLM; import os; print('children', os.environ.get('OMP_WAIT_POLICY'))"
)
COMMAND = (
    "import sys; sys.argv = ['modelmill', 'doctor', '--json']; from modelmill.cli.main "
    "import main; main()"
)


def spins(code: str, **more: str) -> tuple[str | None, str]:
    """GOMP_SPINCOUNT as the runtime tells it, and what the program prints.

    Skips where the runtime is not GNU's.
    """
    clean = {
        name: value
        for name, value in env.child_process_env().items()
        if name not in env.OPENMP_WAIT_VARS
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        env={**clean, "OMP_DISPLAY_ENV": "VERBOSE", **more},
        capture_output=True,
        text=True,
        check=True,
    )
    match = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    if match is None:
        pytest.skip("this torch has no GNU OpenMP")
    return match[1], done.stdout


@pytest.mark.parametrize("code", [LIBRARY, COMMAND], ids=["library", "command line"])
def test_threads_sleep_at_once(code: str) -> None:
    count, printed = spins(code)
    assert count == "0"
    assert '"waiting": "OMP_WAIT_POLICY=PASSIVE"' in printed or "children None" in printed, (
        "the user's children"
    )


@pytest.mark.parametrize("name", env.OPENMP_WAIT_VARS)
def test_a_users_own_word_is_kept(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in env.OPENMP_WAIT_VARS:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "7")
    monkeypatch.setattr(env, "_values_read", {})
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    env.set_openmp_passive_waiting()
    assert env.openmp_wait_vars_in_env() == {name: "7"}
    with env.openmp_passive_during_imports():
        assert env.openmp_wait_vars_in_env() == {name: "7"}


def test_a_users_own_word_stands() -> None:
    count, printed = spins(COMMAND, GOMP_SPINCOUNT="77")
    assert count == "77"
    assert '"waiting": "GOMP_SPINCOUNT=77"' in printed


def test_a_users_own_word_stands_for_the_library() -> None:
    assert spins(LIBRARY, OMP_WAIT_POLICY="ACTIVE")[0] not in (None, "0")


def test_a_worker_gets_the_wait_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []

    async def start(*_: Any, **options: Any) -> None:
        environments.append(options["env"])
        raise OSError

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    for name in env.OPENMP_WAIT_VARS:
        monkeypatch.delenv(name, raising=False)
    for value in (None, "ACTIVE"):
        if value:
            monkeypatch.setenv("OMP_WAIT_POLICY", value)
        with pytest.raises(OSError):
            asyncio.run(worker_process.launch_worker())
    assert [each["OMP_WAIT_POLICY"] for each in environments] == ["PASSIVE", "ACTIVE"]


LATE = """
import time, torch
from modelmill.ops.cpu.common import openmp
from modelmill.loader.device import set_cpu_threads
x = torch.randn(1 << 22)

def spun():
    torch.set_num_threads(2)
    found = []
    for _ in range(9):
        x.add(1)
        before = time.process_time()
        time.sleep(0.03)
        found.append(time.process_time() - before)
    return sorted(found)

before = spun()
set_cpu_threads(2)
print(before[-1], spun()[4], openmp.describe_wait_policy())
"""


def test_where_torch_was_first_its_threads_spin_no_longer() -> None:
    before, after, output = spins(LATE)[1].split(maxsplit=2)
    if float(before) < 0.001:
        pytest.skip("threads do not spin here: more of them than processors")
    assert float(after) < float(before) / 4, "seconds of processor time while the process sleeps"
    assert output.startswith("spin for microseconds")
    *_, output = spins(LATE, GOMP_SPINCOUNT="200000")[1].split(maxsplit=2)
    assert output.strip() == "GOMP_SPINCOUNT=200000", "a user's own word stands"
