"""Launches a kernel of ours with the silent driver: prints the launch arguments of
``CachedLauncher``, then of Triton.

Run by test_fast_launch_driver_calls.py in a process of its own, which finds that driver
(``benchmarks/fake_cuda_driver.py``).
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from typing import Any

import torch

from benchmarks import fake_cuda_driver

# norm_quant's kernel: nine addresses, seven numbers, and two pieces of memory for Triton's own use
WIDTHS = [8] * 9 + [4] * 7 + [8] * 2


def last_launch(driver: ctypes.CDLL) -> dict[str, Any]:
    """Return the arguments of the last launch."""
    driver.last_launch.restype = ctypes.c_void_p
    text = ctypes.string_at(driver.last_launch(), 24 + 32 + 8 * 32)
    launches, function, stream, *sizes = struct.unpack_from("=3Q8I", text)
    words = list(struct.unpack_from("=32Q", text, 56))[: len(WIDTHS)]
    return {
        "launches": launches,
        "function": function,
        "stream": stream,
        "sizes": sizes,
        "words": words,
    }


def main() -> None:
    """Three launches each way: twice the same rows, then fewer."""
    fake_cuda_driver.fake_hopper_device()
    driver = ctypes.CDLL("libcuda.so.1")
    driver.expect((ctypes.c_int * len(WIDTHS))(*WIDTHS), len(WIDTHS))
    from modelmill.ops.quant_types import ActQuantSpec
    from modelmill.ops.triton.common import fast_launch
    from modelmill.ops.triton.norm_quantize import norm_quant

    weight = torch.ones(512, dtype=torch.bfloat16)
    inputs = [torch.randn(rows, 512).to(torch.bfloat16) for rows in (7, 7, 5)]
    outputs = []

    def run_launches() -> list[dict[str, Any]]:
        launches = []
        for x in inputs:
            outputs.append(
                norm_quant.rms_norm_quant(x, None, weight, 1e-5, ActQuantSpec(torch.int8))
            )
            launches.append(
                last_launch(driver)
                | {"x": x.data_ptr(), "values": outputs[-1][0].data_ptr(), "rows": x.shape[0]}
            )
        return launches

    cached = run_launches()
    compiled_launches = [
        launch.__name__ for launch in norm_quant._launcher.compiled_launches.values()
    ]
    kernel = norm_quant._launcher.kernel

    def by_triton(
        self: Any,
        grid: Any,
        pointers: Any,
        numbers: Any,
        fixed: Any,
        rest: Any,
        options: Any,
        *_: Any,
    ) -> None:
        kernel[grid](*pointers, *numbers, *rest, **options)

    fast_launch.CachedLauncher.__call__ = by_triton  # type: ignore[method-assign, assignment]
    json.dump(
        {
            "cached": cached,
            "triton": run_launches(),
            "compiled_launches": compiled_launches,
            "stream": fake_cuda_driver.FAKE_STREAM,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
