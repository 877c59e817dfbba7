"""Plant faults in a copy of the package and check that ``make test`` sees every one.

    python -m tools.mutation_check [FAULT ...] [--marks "not slow and ..."]

Each fault changes one place of one file; the tests of its area then run up to the first failure,
with the selection of ``make test`` unless ``--marks`` says otherwise. The test that fails is run
again without the fault, where it has to pass. A fault that no test sees is named, and the exit
status is 1. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("modelmill", "tests", "benchmarks", "tools", "examples", "docs", "pyproject.toml")


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        name: Of the fault.
        path: File, from the root of the repository.
        before: Text that occurs once in the file.
        after: What stands there with the fault.
        tests: Files of its area that have to see it; the whole check takes minutes with them.
    """

    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]


_OTHER_AREAS = (
    Fault(
        "nn: a rank weights its experts as the first ones",
        "modelmill/nn/fused_moe.py",
        "return routing[:, first:end]",
        "return routing[:, : end - first]",
        ("tests/parallel/test_expert_parallel.py",),
    ),
    Fault(
        "triton: ids of a rank's experts count from 0 of all",
        "modelmill/ops/triton/moe/fused_topk.py",
        "expert = tl.where(local, expert - FIRST, NONE)",
        "expert = tl.where(local, expert, NONE)",
        ("tests/ops/test_local_experts.py",),
    ),
    Fault(
        "quant: GPTQ leaves the columns in the order of rounding",
        "modelmill/quant/gptq.py",
        "out[:, order] = values",
        "out[:] = values",
        ("tests/quant/test_gptq.py",),
    ),
    Fault(
        "checkpoint: Q4_0 with another zero point",
        "modelmill/checkpoint/ggml_types.py",
        "_read_float16(b, 0) * (_unpack_bits(b[:, 2:], 16, 4).float() - 8)",
        "_read_float16(b, 0) * (_unpack_bits(b[:, 2:], 16, 4).float() - 7)",
        ("tests/checkpoint/test_ggml_types.py",),
    ),
    Fault(
        "builder: a head of its own is tied where one value is equal",
        "modelmill/builder/model_config.py",
        "all(bool((a.float() == b.float()).all())",
        "all(bool((a.float() == b.float()).any())",
        ("tests/builder/test_tied_head.py",),
    ),
    Fault(
        "vision: boxes that overlap count twice",
        "modelmill/vision/masks.py",
        "(area_a[:, None] + area_b[None] - intersection)",
        "(area_a[:, None] + area_b[None])",
        ("tests/vision/test_masks.py",),
    ),
    Fault(
        "nn: GPT-2's MLP without its activation",
        "modelmill/nn/mlp.py",
        "self.down_proj(self.act(self.fc_proj(x, step), step), step)",
        "self.down_proj(self.fc_proj(x, step), step)",
        ("tests/models/test_families.py",),
    ),
)
FAULTS = (
    Fault(
        "reference: attention window one key too wide",
        "modelmill/ops/paged_attention.py",
        "column > row - window",
        "column >= row - window",
        ("tests/ops/test_implementations.py",),
    ),
    Fault(
        "triton: RMS norm without eps",
        "modelmill/ops/triton/norm_quantize/rms_norm.py",
        "axis=1) / width + eps)",
        "axis=1) / width)",
        ("tests/ops/test_implementations.py",),
    ),
    Fault(
        "triton: decode attention forgets to rescale",
        "modelmill/ops/triton/attention/paged_decode.py",
        "acc = acc * rescale[:, None] + ",
        "acc = acc + ",
        ("tests/ops/test_implementations.py",),
    ),
    Fault(
        "cpu: RoPE ignores the factor of q",
        "modelmill/ops/cpu/attention/rope_cache.cpp",
        "r.q_scale ? r.q_scale[t] : 1.0f",
        "1.0f",
        ("tests/ops/test_rope_cache_8bit.py", "tests/ops/test_implementations.py"),
    ),
    Fault(
        "cpu: dynamic int8 scales of another range",
        "modelmill/ops/cpu/norm_quantize/quantize.cpp",
        "scales[r] = most / 127.0f",
        "scales[r] = most / 128.0f",
        ("tests/ops/test_norm_quant.py",),
    ),
    Fault(
        "cuda: a group's amax misses lanes",
        "modelmill/ops/cuda/norm_quantize/rptq_quant.cu",
        "for (int by = LANES / 2; by > 0; by /= 2)",
        "for (int by = LANES / 2; by > 1; by /= 2)",
        ("tests/ops/test_rptq_quant_emulated.py",),
    ),
    Fault(
        "cuda: decode window one key too narrow",
        "modelmill/ops/cuda/attention/paged_decode.cuh",
        "max(length - w.window, 0)",
        "max(length - w.window + 1, 0)",
        ("tests/ops/test_paged_decode_emulated.py",),
    ),
    Fault(
        "runtime: a shared page is freed at once",
        "modelmill/runtime/kv_pages.py",
        "\n        self.refs[page] += 1",
        "\n        self.refs[page] = 1",
        ("tests/runtime/test_kv_pages.py", "tests/runtime/test_engine_core.py"),
    ),
    Fault(
        "runtime: a page is cached before it is full",
        "modelmill/runtime/scheduler.py",
        "full = min(seq.computed, len(seq.tokens)) // size",
        "full = -(-min(seq.computed, len(seq.tokens)) // size)",
        ("tests/runtime/test_engine_core.py",),
    ),
    Fault(
        "runtime: a preempted sequence still runs in the step",
        "modelmill/runtime/scheduler.py",
        "            picked.pop(member, None)\n            # a copy into a released page",
        "            # a copy into a released page",
        ("tests/runtime/test_engine_core.py", "tests/runtime/test_beam_search.py"),
    ),
    Fault(
        "runtime: negative logits are not penalized",
        "modelmill/runtime/logits_processors.py",
        "torch.where(logits > 0, logits / penalty, logits * penalty)",
        "logits / penalty",
        ("tests/runtime/test_sampler.py", "tests/runtime/test_logits_processors.py"),
    ),
    Fault(
        "runtime: noise does not depend on the position",
        "modelmill/runtime/sampler.py",
        "counter = positions.astype(np.uint64) * _GOLDEN_GAMMA",
        "counter = np.zeros_like(positions).astype(np.uint64) * _GOLDEN_GAMMA",
        ("tests/runtime/test_sampler.py",),
    ),
    Fault(
        "runtime: beams ignore the length penalty",
        "modelmill/runtime/beam_search.py",
        "np.float32(float(length) ** self.length_penalty)",
        "np.float32(float(length))",
        ("tests/runtime/test_beam_search.py",),
    ),
    Fault(
        "text: half of a stop string is sent",
        "modelmill/text/stop_matcher.py",
        "keep = len(buffer) - self._depth[state]",
        "keep = len(buffer)",
        ("tests/text/test_stop_matcher.py",),
    ),
    Fault(
        "serve: a wrong API key is let in",
        "modelmill/serve/middleware.py",
        "for known, each in policies if hmac.compare_digest(digest, known)]",
        "for known, each in policies if len(digest) == len(known)]",
        ("tests/trust/test_serving.py",),
    ),
    Fault(
        "serve: tenants share the prefix cache",
        "modelmill/serve/middleware.py",
        "self._secret, digest, hashlib.sha256",
        'self._secret, b"", hashlib.sha256',
        ("tests/trust/test_serving.py",),
    ),
    Fault(
        "serve: a client that leaves is not noticed",
        "modelmill/serve/request_handle.py",
        "self._pending_items = []\n        if unfinished:\n",
        "self._pending_items = []\n        if False:\n",
        ("tests/serve/test_engine_client.py", "tests/serve/test_service.py"),
    ),
    Fault(
        "serve: a slow client fills the memory",
        "modelmill/serve/request_handle.py",
        "elif self._pending_weight > MAX_PENDING_ITEMS:",
        "elif self._pending_weight < 0:",
        ("tests/serve/test_engine_client.py",),
    ),
    Fault(
        "accept: NaN counts as equal",
        "modelmill/accept/error_metrics.py",
        "if not math.isfinite(max_abs):",
        "if math.isinf(max_abs):",
        ("tests/accept/test_error_metrics.py",),
    ),
    Fault(
        "accept: a bound that NaN does not break",
        "modelmill/accept/tolerances.py",
        "if not value <= limit",
        "if value > limit",
        ("tests/accept/test_tolerances.py",),
    ),
    Fault(
        "accept: linear modules may be 100 times as wrong",
        "modelmill/accept/tolerances.py",
        '"linear": {"float32": (1e-5, 3e-5)',
        '"linear": {"float32": (1e-3, 3e-3)',
        ("tests/accept/test_tolerances.py",),
    ),
    Fault(
        "accept: the engine's weights are not compared",
        "modelmill/accept/quantized_layers.py",
        "            self.findings.append(ToleranceCheckResult(path, index, module, row, bound))",
        "            ToleranceCheckResult(path, index, module, row, bound)",
        ("tests/accept/test_row_and_tile_errors.py",),
    ),
    *_OTHER_AREAS,
)


def copy_tree(folder: Path) -> None:
    """Copy what the tests need into ``folder``; data beside the checkout is linked."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "results")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy2(source, folder / name)
    for path in ROOT.glob("*.*"):
        if path.is_file() and not (folder / path.name).exists():
            shutil.copy2(path, folder / path.name)
    if (ROOT.parent / "shared").is_dir():
        (folder.parent / "shared").symlink_to(ROOT.parent / "shared")


def failing_test(folder: Path, fault: Fault, marks: str | None) -> str | None:
    """The first test that fails with the fault in ``folder``; None if none does.

    Raises:
        RuntimeError: if the tests did not run, or that test fails without the fault too.
    """
    path = folder / fault.path
    original = path.read_text()
    path.write_text(original.replace(fault.before, fault.after))
    try:
        failed, output = run_tests(folder, fault.tests, marks)
    finally:
        path.write_text(original)
    if failed is None:
        return None
    if not failed:
        raise RuntimeError(f"{fault.name}: the tests did not run:\n{output[-2000:]}")
    without_fault, _ = run_tests(folder, (failed,), marks)
    if without_fault is not None:
        raise RuntimeError(f"{fault.name}: {failed} fails without the fault too; mend it first")
    return failed


def run_tests(folder: Path, tests: Sequence[str], marks: str | None) -> tuple[str | None, str]:
    """Run tests up to the first failure.

    Returns:
        (the failing test's id, "" if pytest could not run them, None if all passed; output)
    """
    command = [sys.executable, "-m", "pytest", "--quick", "-x", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(["-m", marks] if marks else []), *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None, done.stdout
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode != 1 or not failed:
        return "", done.stdout
    return failed[0].split(" - ")[0].partition(" ")[2], done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 if a fault was not seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="part of a name; default: all")
    parser.add_argument("--marks", help="pytest's -m; default: that of make test")
    options = parser.parse_args(arguments)
    chosen = [
        fault
        for fault in FAULTS
        if not options.faults or any(part in fault.name for part in options.faults)
    ]
    if not chosen:
        parser.error(f"no fault is named like {options.faults}")
    missed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkout"
        folder.mkdir()
        copy_tree(folder)
        for number, fault in enumerate(chosen, 1):
            started = time.monotonic()
            test = failing_test(folder, fault, options.marks)
            missed += test is None
            verdict = test or "NOT SEEN"
            seconds = time.monotonic() - started
            print(f"[{number}/{len(chosen)}] {fault.name}: {verdict} ({seconds:.0f} s)", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults seen")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
