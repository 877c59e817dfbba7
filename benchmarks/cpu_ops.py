"""Compare CPU kernels with torch's reference in turn; rows in benchmarks/results/cpu.jsonl.

python benchmarks/cpu_ops.py [--threads 2] [--op linear] [--dtype float32] [--runs 15]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.ops import main  # noqa: E402

if __name__ == "__main__":
    main(device="cpu", out=ROOT / "benchmarks" / "results" / "cpu.jsonl")
