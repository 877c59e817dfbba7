"""Autotune a model shape's launch configs and time decode steps with and without them.

Tunes on this GPU as ``modelmill build`` does; both variants run in turn, in one run.

    python benchmarks/autotune.py qwen-7b [--weights int8] [--decode 1x128,8x1024] [--save
    FILE.jsonl]

The plan comes from a checkpoint whose files have their size and no content: a plan reads names and
shapes alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import struct
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.model_shapes import SHAPES, tensors  # noqa: E402
from benchmarks.model_step import greedy_ids, make_step, random_model  # noqa: E402
from benchmarks.workloads import parse_pairs  # noqa: E402
from modelmill.artifact.autotune_store import AutotuneRecord  # noqa: E402
from modelmill.builder.autotune_measure import autotune  # noqa: E402
from modelmill.builder.plan import BuildPlan, make_build_plan  # noqa: E402
from modelmill.checkpoint.open import open_checkpoint  # noqa: E402
from modelmill.core.config import BuildConfig  # noqa: E402
from modelmill.eval.report import MeasurementStats, append_rows, device_name, make_row  # noqa: E402
from modelmill.ops.launch_configs import TunedLaunchConfigs, parse_key  # noqa: E402
from modelmill.ops.timing import capture_graph, time_interleaved  # noqa: E402

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
ROUNDS, QUEUED_STEPS = 25, 4


def sparse_checkpoint(shape: str, folder: Path) -> Path:
    """A checkpoint of a shape whose weight file takes no room on the disk."""
    config = SHAPES[shape]
    dtype = str(config["torch_dtype"])
    header, at = {}, 0
    for shard in tensors({**config}):
        for name, size in shard.items():
            end = at + torch.Size(size).numel() * getattr(torch, dtype).itemsize
            header[name] = {"dtype": DTYPES[dtype], "shape": list(size), "data_offsets": [at, end]}
            at = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def build_plan(shape: str, folder: Path, weights: str) -> BuildPlan:
    """The plan of a build for this GPU."""
    recipe = "none" if weights == "dense" else weights
    dtype = str(SHAPES[shape]["torch_dtype"])
    return make_build_plan(
        open_checkpoint(sparse_checkpoint(shape, folder)),
        BuildConfig(target="cuda", dtype=dtype, quantization=recipe),
    )


def load_tuning(stored: AutotuneRecord) -> TunedLaunchConfigs:
    """What a start makes of a stored tuning."""
    choices = {
        op: {parse_key(k): sizes for k, sizes in each.items()}
        for op, each in stored.choices.items()
    }
    return TunedLaunchConfigs(stored.device, choices)


@torch.inference_mode()
def main() -> None:
    """Tune, print what was chosen, time both, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--weights", default="dense")
    parser.add_argument("--decode", default="1x128,8x1024,16x128")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        stored = autotune(build_plan(options.shape, Path(folder), options.weights))
    if stored is None:
        raise SystemExit("nothing was tuned")
    print(json.dumps({"choices": stored.choices, "facts": stored.facts}), flush=True)
    print(f"tuned in {time.perf_counter() - began:.1f} s", flush=True)
    model = random_model(options.shape, options.weights)
    command = "python benchmarks/autotune.py " + " ".join(sys.argv[1:])
    about = {
        "shape": options.shape,
        "weights": options.weights,
        "run": f"tuning-{options.shape}-{options.weights}",
    }
    for batch, context in parse_pairs(options.decode):
        replays = []
        for tuning in (None, load_tuning(stored)):
            call = functools.partial(greedy_ids, model, make_step(model, batch, 1, context, tuning))
            call()
            replays.append(capture_graph(call))
        times = time_interleaved(replays, ROUNDS, QUEUED_STEPS, "cuda")
        for state, seconds in zip(
            ("default launch configs", "launch configs of a tuned build"), times, strict=True
        ):
            spread = MeasurementStats.from_values([each * 1e3 for each in seconds])
            facts = {**about, "batch": batch, "context": context, "state": state, "spread": spread}
            line = make_row(
                command,
                "step.decode_ms",
                round(spread.median, 4),
                "ms",
                device_name("cuda"),
                **facts,
            )
            print(
                f"{batch}x{context} {state}: {spread.median:.4f} ms ({spread.min:.4f} … "
                f"{spread.max:.4f})",
                flush=True,
            )
            if options.save is not None:
                append_rows(options.save, [line])


if __name__ == "__main__":
    main()
