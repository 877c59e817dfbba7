"""Times every variant of every op against the ceilings of the device, and keeps the rows.

    python benchmarks/ops.py [--op linear --op rms_norm] [--dtype bfloat16] [--variant triton]
    [--case NAME]
                             [--device cuda] [--threads 2] [--runs 15] [--save FILE.jsonl]

The same as ``modelmill bench ops``, for several dtypes in one run, with one line a figure as it is
measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from modelmill.cli.bench_ops import make_op_rows  # noqa: E402
from modelmill.eval.op_bench import OpBenchSelection, bench_ops  # noqa: E402
from modelmill.eval.report import append_rows, device_name  # noqa: E402
from modelmill.eval.roofline import measure_roofline  # noqa: E402


@torch.inference_mode()
def main(words: Sequence[str] | None = None, device: str = "cuda", out: Path | None = None) -> None:
    """Measure, print and record. device, out: where --device and --save are not given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--dtype", action="append", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--variant", action="append", default=[])
    parser.add_argument("--case", default="")
    parser.add_argument("--device", default=device)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--save", type=Path, default=out)
    options = parser.parse_args(words)
    if options.threads:
        torch.set_num_threads(options.threads)
    selection = OpBenchSelection(
        tuple(options.op), tuple(options.variant), options.case, options.runs
    )
    command = shlex.join(["python", *sys.argv])
    usual = ["bfloat16"] if options.device.startswith("cuda") else ["float32", "bfloat16"]
    for dtype in options.dtype or usual:
        ceilings = measure_roofline(options.device, [getattr(torch, dtype)])
        facts = {
            "device": device_name(options.device),
            "dtype": dtype,
            "ceilings": ceilings.to_dict(),
        }
        print(json.dumps(facts), flush=True)
        for each in bench_ops(ceilings, getattr(torch, dtype), selection):
            print(json.dumps(each.to_dict()), flush=True)
            if options.save is not None:
                append_rows(
                    options.save, make_op_rows(command, {**facts, "results": [each.to_dict()]})
                )


if __name__ == "__main__":
    main()
