"""Freed memory is used again in processes of ours: page faults counted by the system."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from modelmill.core import env, malloc

CODE = """
import ctypes, json, os, resource, sys
from modelmill.core import malloc
kept = malloc.set_malloc_thresholds() if sys.argv[1] == "kept" else None
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(40 << 20)
    ctypes.memset(block, 1, 40 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

found = [faults() for _ in range(4)]
before = resident()
malloc.trim_heap()
print(json.dumps([kept, found, before - resident()]))
"""  # noqa: E501


def run_with_malloc(mode: str, **more: str) -> tuple[bool | None, list[int], int]:
    clean = {
        n: v for n, v in env.child_process_env().items() if not n.startswith(("MALLOC_", "GLIBC_"))
    }
    command = [sys.executable, "-c", CODE, mode]
    keeps_blocks, faults, returned = json.loads(
        subprocess.check_output(command, env={**clean, **more})
    )
    return keeps_blocks, faults, returned


@pytest.mark.skipif(malloc._load_glibc() is None, reason="another C library than glibc")
def test_a_large_block_is_the_one_before() -> None:
    _, usual, _ = run_with_malloc("usual")
    keeps_blocks, faults, returned = run_with_malloc("kept")
    assert keeps_blocks
    assert min(usual) > 8 * max(faults[1:]), (
        "a fault for each of 10,240 pages, or for each huge one"
    )
    assert returned > 32 << 20, "and it can be given back"


@pytest.mark.parametrize(
    "more", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}]
)
def test_a_users_own_word_stands(more: dict[str, str]) -> None:
    assert run_with_malloc("kept", **more)[0] is False
