"""The kernels' own threads: every piece once, several callers, a forked child, a changed number of
threads.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from modelmill.ops.cpu.common import build, prebuilt
from modelmill.ops.cpu.common.thread_pool import single_thread_torch
from modelmill.ops.cpu.gemm_16bit import linear
from modelmill.ops.cpu.weight_only_gemm import int8_linear
from modelmill.ops.int8_linear import quantize

pytestmark = pytest.mark.skipif(
    build.unavailable_reason("cpu") is not None, reason=str(build.unavailable_reason("cpu"))
)
requires_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def _product(rows: int = 3) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    weight, scale = quantize(torch.randn(3000, 500, generator=generator))
    args = (torch.randn(rows, 500, generator=generator), weight, scale)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return args, int8_linear.run(*args)
    finally:
        torch.set_num_threads(threads)


def _exit_status_of_fork(is_right: Callable[[], bool]) -> int:
    """0 if ``is_right`` returns True in a forked child, whose threads end with it."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if is_right() else 1)
        finally:  # it raised
            os._exit(2)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@requires_fork
@pytest.mark.parametrize("threads", [1, 2, 3, 7, 70])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    """In a child: workers stay, and 69 of them made every later test twice as slow."""
    args, expected = _product()
    expected_bytes = expected.numpy().tobytes()

    def is_right() -> bool:
        torch.set_num_threads(threads)
        outputs = [int8_linear.run(*args) for _ in range(20)]
        return all(output.numpy().tobytes() == expected_bytes for output in outputs)

    assert _exit_status_of_fork(is_right) == 0


def test_several_callers_at_once() -> None:
    # more rows than keep Python's lock: the calls really overlap
    args, expected = _product(rows=17)
    wrong = []

    def call() -> None:
        torch.set_num_threads(2)
        for _ in range(20):
            if not torch.equal(int8_linear.run(*args), expected):
                wrong.append(threading.get_ident())

    running = [threading.Thread(target=call) for _ in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong


@requires_fork
def test_a_forked_child_computes_too() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    args, expected = _product()
    int8_linear.run(*args)
    # torch's own parallel loops are not for forked children: compare the bytes
    expected_bytes = expected.numpy().tobytes()
    status = _exit_status_of_fork(
        lambda: int8_linear.run(*args).numpy().tobytes() == expected_bytes
    )
    torch.set_num_threads(before)
    assert status == 0
    assert torch.equal(int8_linear.run(*args), expected)


def test_ours_use_threads_while_torch_uses_one() -> None:
    args, expected = _product(40)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with single_thread_torch():
            assert torch.get_num_threads() == 1
            assert torch.equal(int8_linear.run(*args), expected)
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError), single_thread_torch():
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_thread_that_begins_meanwhile_has_its_own_number() -> None:
    before, counts = torch.get_num_threads(), list[int]()
    torch.set_num_threads(2)
    try:
        with single_thread_torch():
            other = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
            other.start()
            other.join()
            assert torch.get_num_threads() == 1
        assert counts == [2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("processor", "torchs"),
    [
        ("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16 amx_bf16", True),
        ("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16", False),
        ("vendor_id : AuthenticAMD\nflags : avx512f avx512_bf16", False),
        ("vendor_id : AuthenticAMD\nflags : avx2", False),
    ],
)
def test_who_multiplies_many_rows(
    processor: str, torchs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch multiplies waits at OpenMP's barriers: only where it is much faster."""
    monkeypatch.setattr(build, "_processor_identity", lambda: processor)
    assert build.torch_gemm_is_faster.__wrapped__() is torchs


def test_own_threads_carry_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "torch_gemm_is_faster", lambda: False)
    if build.load_or_compile_library().vector_width < 8:
        pytest.skip("vectors are too narrow here")
    linear.max_cpp_kernel_rows.cache_clear()
    try:
        args, expected = _product(40)
        monkeypatch.setattr(torch, "mm", lambda *_, **__: pytest.fail("torch multiplies"))
        x, weight, scale = args
        output = int8_linear.run(x.bfloat16(), weight, scale)
        assert torch.allclose(output.float(), expected, rtol=0.05, atol=0.5)
    finally:
        linear.max_cpp_kernel_rows.cache_clear()


PROBE = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common/thread_pool.cpp"

// Two pieces for two threads: the caller waits in its own until the other has come, at most `patience` nanoseconds; the
// other sleeps for `sleep` nanoseconds in its piece. Returns pieces that the other took.
extern "C" int probe(int64_t sleep, int64_t patience) {
    const long caller = syscall(SYS_gettid);
    std::atomic<int> others{0};
    mill::parallel_for(2, 1, 1 << 20, [&](int64_t, int64_t) {
        if (syscall(SYS_gettid) != caller) {
            others++;
            const timespec time{0, sleep};
            if (sleep) nanosleep(&time, nullptr);
            return;
        }
        const int64_t until = mill::now() + patience;
        while (!others.load() && mill::now() < until) {}
    });
    return others.load();
}
"""  # noqa: E501


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no futex here")
def test_a_worker_without_a_core_is_left_out_for_a_while(tmp_path: Path) -> None:
    """Its piece sleeps as a thread does whose core another program has."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler: apt-get install g++")
    source, library = tmp_path / "probe.cpp", tmp_path / "probe.so"
    source.write_text(PROBE)
    flags = [
        "-O2",
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-pthread",
        prebuilt.include_flag(),
    ]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    team = ctypes.CDLL(str(library))
    second = 10**9
    probe = lambda sleep, patience: team.probe(ctypes.c_int64(sleep), ctypes.c_int64(patience))  # noqa: E731
    team.modelmill_set_num_threads(ctypes.c_int64(2))

    def all_called() -> bool:
        """Whether both threads take part, sooner or later: this machine may be a busy one."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if probe(0, second // 100) > 0 and team.modelmill_resting_workers() == 0:
                return True
        return False

    assert all_called()
    assert probe(second // 20, 10 * second) > 0
    assert team.modelmill_resting_workers() == 1
    assert probe(0, 0) == 0, "the caller does it all"
    assert all_called(), "again when the while is over"
