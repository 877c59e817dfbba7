"""Measure Segment Anything's ViT-H on the GPU: encoder (beside peers), click, everything.

    python benchmarks/sam.py [--sides bfloat16,fp8,smoothquant,transformers,…]
                             [--works encoder,click,everything] [--batches 1,8] [--rounds 9]
                             [--segment-anything-fast DIR] [--depth N] [--kernel OP=VARIANT]
                             [--ready-within SECONDS] [--work DIR] [--out FILE.jsonl]

encoder: normalised pixels [B, 3, 1024, 1024] on the device to embeddings there; sides take turns
call by call, every call on other pixels. click: one point on an embedding that is kept, to three
masks of 1800 × 1200 on the host, ours. everything: a new picture of 1800 × 1200, 1,024 points, to
masks on the host, ours. A call is timed by the host's clock until the device is done. Weights are
drawn at random, whose scores and boxes mean nothing: thresholds are chosen so that at most 85 % of
all masks pass the first one, none is unstable, and 100 or more are returned; how many these were
stands in the row (``passing``, ``returned``). Boxes are so alike that it is all of them or one.
Sides of ours: how the encoder's matrices are held (``weight_formats.py``; bfloat16: as they are).

Peers of the encoder: ``transformers`` eagerly, ``transformers-compiled`` with torch.compile's
defaults, and those of ``sam_peer.py``, which replay CUDA graphs: ``transformers-max-autotune``,
``transformers-reduce-overhead``, and with a checkout of it ``segment-anything-fast``, also with
``-sdpa`` and ``-int8``. Each of these has a process for each batch. All compile at the same time,
before anything is measured; --ready-within goes on without those that take longer.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.append_rows import append_rows, portable_command  # noqa: E402
from benchmarks.figure_statistics import whole_call_figure  # noqa: E402
from benchmarks.peer_process import PeerError, PeerProcess  # noqa: E402
from benchmarks.sam_peer import (  # noqa: E402
    COMPILED_SIDES,
    FAST,
    random_pixels,
    side_environment,
    transformers_encoder,
)
from benchmarks.weight_formats import weight_quantizer  # noqa: E402
from modelmill.eval.report import device_name, versions  # noqa: E402
from modelmill.models import sam  # noqa: E402
from modelmill.models._sam_vit import SamVitSpec  # noqa: E402
from modelmill.nn.linear import Linear  # noqa: E402
from modelmill.nn.synthetic_step import fill_random_weights  # noqa: E402
from modelmill.nn.vision_context import VisionContext  # noqa: E402
from modelmill.ops.registry import select_backends  # noqa: E402
from modelmill.vision.automatic_mask_options import AutomaticMaskOptions  # noqa: E402
from modelmill.vision.prompts import Prompt  # noqa: E402
from modelmill.vision.sam_model import SamModel  # noqa: E402

VIT_H = SamVitSpec(width=1280, depth=32, heads=16, global_attn_indexes=(7, 15, 23, 31), inner=5120)
IMAGE_SIZE = (1800, 1200)
PEER = "transformers"
BESIDE_FAST = (PEER, f"{PEER}-max-autotune", FAST)
IOU_THRESHOLD, MASKS_RETURNED = 0.85, 100
TimeEncoder = Callable[[int, int], float]
"""Seconds of a call of (so many pictures, their seed)."""


@dataclass(frozen=True)
class SamSide:
    """One subject. batch: the only one that it knows. model: ours, for the other works."""

    name: str
    time_encoder: TimeEncoder
    facts: dict[str, Any]
    model: SamModel | None = None
    batch: int | None = None


def side_in_this_process(
    name: str,
    embed: Callable[[torch.Tensor], object],
    device: str,
    facts: dict[str, Any],
    model: SamModel | None = None,
) -> SamSide:
    """Return a side whose calls are timed here. embed: pixels to embeddings."""

    def time_encoder(batch: int, seed: int) -> float:
        return time_call(functools.partial(embed, random_pixels(batch, seed, device)))

    return SamSide(name, time_encoder, facts, model)


def vit_h_spec(depth: int | None) -> SamVitSpec:
    """Return the config of ViT-H; depth: fewer layers, for a dry run."""
    if depth is None:
        return VIT_H
    return SamVitSpec(VIT_H.width, depth, VIT_H.heads, (depth - 1,), VIT_H.inner)


def random_model(name: str, spec: SamVitSpec, device: str) -> nn.Module:
    """Our model: the encoder in bfloat16 or held as the name says, prompts and masks in float32."""
    model = sam.Model(sam.SamConfig(spec))
    encoder = [n for n, m in model.image_encoder.named_modules() if isinstance(m, Linear)]
    quantizer = (
        {}
        if name == "bfloat16"
        else {n: weight_quantizer(name) for n in encoder if n.startswith("blocks.")}
    )
    fill_random_weights(model.image_encoder, quantizer, torch.bfloat16, device)
    for rest in (model.prompt_encoder, model.mask_decoder):
        fill_random_weights(rest, {}, torch.float32, device)
    return model


def modelmill_side(name: str, spec: SamVitSpec, device: str, kernels: Mapping[str, str]) -> SamSide:
    """An eye around a drawn model. kernels: OP → variant, switched by hand."""
    ops = select_backends(device, kernels)
    sam_model = SamModel(
        random_model(name, spec, device), VisionContext(ops), sam.IMAGE_MEAN, sam.IMAGE_STD
    )
    facts = {"device": device_name(device), "versions": versions(), "kernels": dict(ops.backends)}

    def embed(pixels: torch.Tensor) -> torch.Tensor:
        return torch.cat(sam_model.run_encoder(pixels))

    return side_in_this_process(name, embed, device, facts, sam_model)


def transformers_side(name: str, spec: SamVitSpec, device: str) -> SamSide:
    """Return transformers' SamModel in bfloat16; ``-compiled``: its encoder with torch.compile."""
    encoder = transformers_encoder(asdict(spec), device)
    call = torch.compile(encoder) if name.endswith("-compiled") else encoder
    versions = {each: importlib.metadata.version(each) for each in ("transformers", "torch")}
    facts = {
        "device": device_name(device),
        "versions": versions,
        "attention": encoder.config._attn_implementation,
    }
    return side_in_this_process(name, lambda pixels: call(pixels).last_hidden_state, device, facts)


@contextlib.contextmanager
def compiled_sides(
    names: Sequence[str], spec: SamVitSpec, batches: Sequence[int], options: argparse.Namespace
) -> Iterator[list[SamSide]]:
    """Start the processes of the sides that compile, a side and batch each; without any that fail.

    They compile at the same time, on as many of the host's cores each.
    """
    pairs = [(name, batch) for name in names if name in COMPILED_SIDES for batch in batches]
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    threads = str(max(1, len(os.sched_getaffinity(0)) // max(1, len(pairs))))
    sides = []
    with contextlib.ExitStack() as stack:
        processes = []
        for name, batch in pairs:
            started = f"{name}-batch{batch}"
            arguments = {
                "side": name, "batch": batch, "spec": asdict(spec), "work": str(work / started),
                "lock": str(work / "timing.lock"),
            }  # fmt: skip
            if name.startswith(FAST):
                arguments["segment_anything_fast"] = str(options.segment_anything_fast.resolve())
            command = [sys.executable, "-m", "benchmarks.sam_peer", json.dumps(arguments)]
            environment = {"TORCHINDUCTOR_COMPILE_THREADS": threads, **side_environment(name)}
            log = work / "logs" / f"{started}.log"
            processes.append(PeerProcess(started, command, log, environment))
            stack.callback(processes[-1].close)
        for (name, batch), process in zip(pairs, processes, strict=True):
            try:
                process.ready(options.ready_within)
            except PeerError as error:
                print(f"going on without a peer: {error}", file=sys.stderr, flush=True)
                continue
            took = time.perf_counter() - process.start_time
            print(f"{process.name} was ready after {took:.0f} s", file=sys.stderr, flush=True)
            facts = process.facts | {"ready_s": round(took, 1)}
            sides.append(SamSide(name, _timer_of(process), facts, batch=batch))
        yield sides


def _timer_of(process: PeerProcess) -> TimeEncoder:
    def time_encoder(batch: int, seed: int) -> float:
        return process.generate([(0, 1)] * batch, seed, {"seed": seed})

    return time_encoder


def encoder_rows(
    sides: Sequence[SamSide], batches: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Milliseconds of a call, one row a side and batch."""
    rows = []
    for batch in batches:
        present = [side for side in sides if side.batch in (None, batch)]
        seconds: dict[str, list[float]] = {side.name: [] for side in present}
        for turn in range(-2, rounds):  # the first two compile and record
            for side in present:
                took = side.time_encoder(batch, turn + 10 * batch)
                if turn >= 0:
                    seconds[side.name].append(took)
        for side in present:
            row = make_row("encoder", side, seconds[side.name])
            rows.append(
                row | {"batch": batch, "images_per_s": round(batch / row["value"] * 1e3, 2)}
            )
    return rows


def click_row(side: SamSide, rounds: int) -> dict[str, Any]:
    """Milliseconds from a point to its three masks."""
    assert side.model is not None, "ours"
    sam_model, seconds = side.model, []
    embedding = sam_model.embed_image(random_image(0))
    for turn in range(-3, rounds):
        prompt = Prompt(((900.0 + 40 * turn, 600.0 - 20 * turn),), (1,))
        took = time_call(functools.partial(sam_model.predict, embedding, prompt))
        if turn >= 0:
            seconds.append(took)
    return make_row("click", side, seconds)


def everything_row(side: SamSide, rounds: int) -> dict[str, Any]:
    """Milliseconds from a picture to all its masks."""
    assert side.model is not None, "ours"
    sam_model, seconds, returned = side.model, [], 0
    points = [Prompt(((float(x), 600.0),), (1,)) for x in range(0, IMAGE_SIZE[0], 15)]
    scores = sam_model.decode(sam_model.embed_image(random_image(1)), points)[1][:, 1:]
    passing = float(scores.flatten().quantile(1 - IOU_THRESHOLD))
    thresholds: dict[str, Any] = {
        "pred_iou_thresh": min(1.0, max(0.0, passing)),
        "stability_score_thresh": 0.0,
    }
    # drawn masks have nearly one box: how much two may overlap is found, not given
    overlap = (0.0, 1.0)
    for _ in range(6):
        middle = sum(overlap) / 2
        few = (
            len(
                sam_model.generate_masks(
                    random_image(1), AutomaticMaskOptions(**thresholds, box_nms_thresh=middle)
                )
            )
            < MASKS_RETURNED
        )
        overlap = (middle, overlap[1]) if few else (overlap[0], middle)
    options = AutomaticMaskOptions(**thresholds, box_nms_thresh=overlap[1])
    for turn in range(-2, rounds):
        shown = random_image(turn + 10)
        began = time.perf_counter()
        returned = len(sam_model.generate_masks(shown, options))
        torch.cuda.synchronize()
        if turn >= 0:
            seconds.append(time.perf_counter() - began)
    share = float((scores > options.pred_iou_thresh).float().mean())
    return make_row("everything", side, seconds) | {
        "points": 1024,
        "passing": round(share, 3),
        "returned": returned,
    }


def random_image(seed: int) -> np.ndarray:
    """Return [1200, 1800, 3] uint8, different for each seed: mostly coarse noise, as in photos."""
    coarse = np.random.default_rng(seed + 100).integers(
        0, 256, (IMAGE_SIZE[1] // 20, IMAGE_SIZE[0] // 20, 3), dtype=np.uint8
    )
    return coarse.repeat(20, 0).repeat(20, 1)


@torch.inference_mode()
def time_call(call: Callable[[], object]) -> float:
    """Seconds of one call until the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def make_row(work: str, side: SamSide, seconds: Sequence[float]) -> dict[str, Any]:
    """What is kept of one figure."""
    figure = whole_call_figure(seconds, 1e3)
    return {
        "bench": "sam", "model": "vit_h", "work": work, "subject": side.name,
        "value": round(figure.value, 3),
        "unit": "ms", "spread": {k: round(v, 3) for k, v in figure.to_dict().items()},
        "statistic": "median of whole calls, sides in turn",
        "calls_s": [round(each, 6) for each in seconds], "facts": side.facts,
    }  # fmt: skip


def measure_rows(
    sides: Sequence[SamSide], works: Sequence[str], batches: Sequence[int], rounds: int
) -> list[Any]:
    """Measure the requested works; print rows as they are measured."""
    rows = []
    for work in works:
        if work == "encoder":
            new = encoder_rows(sides, batches, rounds)
        else:
            measure = click_row if work == "click" else everything_row
            new = [measure(next(side for side in sides if side.model is not None), rounds)]
        for each in new:
            shown = {k: v for k, v in each.items() if k not in ("facts", "calls_s")}
            print(json.dumps(shown), flush=True)
        rows += new
    return rows


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--sides",
        help=f"default: bfloat16,fp8,smoothquant,{PEER}; with --segment-anything-fast "
        f"bfloat16,fp8,{','.join(BESIDE_FAST)}, and {FAST}-int8 where torchao is installed",
    )
    parser.add_argument("--works", default="encoder,click,everything")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--depth", type=int, help="of the encoder, for a dry run; do not publish such rows"
    )
    parser.add_argument("--kernel", action="append", default=[], metavar="OP=VARIANT")
    parser.add_argument(
        "--segment-anything-fast", type=Path, metavar="DIR", help="its checkout, for sides of it"
    )
    parser.add_argument(
        "--ready-within", type=float, metavar="SECONDS", help="leave out peers that compile longer"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "out" / "sam", help="of the peers' logs and files"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.sides is None and options.segment_anything_fast is not None:
        int8 = [f"{FAST}-int8"] if importlib.util.find_spec("torchao") else []
        options.sides = ",".join(["bfloat16", "fp8", *BESIDE_FAST, *int8])
    options.sides = options.sides or f"bfloat16,fp8,smoothquant,{PEER}"
    for name in options.sides.split(","):
        if name.startswith(FAST) and options.segment_anything_fast is None:
            parser.error(f"side {name} needs --segment-anything-fast DIR")
        peer = name.startswith((PEER, FAST))
        if peer and name not in (PEER, f"{PEER}-compiled", *COMPILED_SIDES):
            parser.error(f"--sides {name}: {', '.join(COMPILED_SIDES)}")
    return options


@torch.inference_mode()
def main() -> None:
    """Measure, print and record."""
    options = parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spec = vit_h_spec(options.depth)
    names = options.sides.split(",")
    kernels = dict(each.split("=", 1) for each in options.kernel)
    batches = [int(each) for each in options.batches.split(",")]
    with compiled_sides(names, spec, batches, options) as compiled:
        sides = []
        for name in names:
            if name in COMPILED_SIDES:
                sides += [side for side in compiled if side.name == name]
            elif name.startswith(PEER):
                sides.append(transformers_side(name, spec, device))
            else:
                sides.append(modelmill_side(name, spec, device, kernels))
        rows = measure_rows(sides, options.works.split(","), batches, options.rounds)
    if options.out:
        append_rows(options.out, rows, portable_command("sam", sys.argv[1:]))


if __name__ == "__main__":
    main()
