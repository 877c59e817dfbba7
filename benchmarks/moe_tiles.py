"""Times candidate tiles of the grouped kernels of mixtures of experts on a GPU.

    python benchmarks/moe_tiles.py [--format dense] [--tokens 1] [--layers 8] [--shape gpt-oss-20b]
                                   [--kernel cuda]

One tile is changed at a time, in the experts alone (routing is computed before), each time in a
CUDA graph of all layers; with --kernel cuda one constant of cuda/moe/grouped_gemm_wq.py. Printed:
one JSON line for each candidate, microseconds a layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import moe_step  # noqa: E402
from modelmill.nn.fused_moe import FusedMoE, route_tokens  # noqa: E402
from modelmill.nn.moe import MoE  # noqa: E402
from modelmill.ops.cuda.moe import grouped_gemm_wq  # noqa: E402
from modelmill.ops.timing import capture_graph, time_interleaved  # noqa: E402
from modelmill.ops.triton.moe import (  # noqa: E402
    experts,
    grouped_gemm,
    grouped_gemm_int4,
    int4_fused_moe,
    moe_decode,
    moe_decode_int4,
)
from modelmill.ops.triton.moe.grouped_gemm import GroupedLaunchConfig  # noqa: E402

TOKENS = (1, 2, 8, 32, 64, 256, 1024, 4096)
ROUNDS = 7
DECODE: dict[str, dict[str, tuple[tuple[int, int, int], ...]]] = {
    "dense": {
        "GATE_UP_LAUNCH_CONFIG": (
            (1, 2048, 4), (2, 2048, 4), (8, 512, 4), (1, 1024, 2), (4, 512, 4),
        ),
        "DOWN_LAUNCH_CONFIG": ((2, 256, 4), (4, 256, 8), (1, 256, 2), (2, 128, 2), (4, 256, 4)),
    },
    "int8": {
        "GATE_UP_LAUNCH_CONFIG_8BIT": (
            (2, 2048, 4), (4, 2048, 4), (8, 512, 4), (4, 512, 2), (16, 512, 8), (8, 512, 2),
            (4, 1024, 4), (2, 512, 1),
        ),
        "DOWN_LAUNCH_CONFIG_8BIT": (
            (2, 256, 4), (4, 256, 4), (8, 256, 4), (4, 256, 8), (2, 256, 2), (2, 1024, 4),
            (4, 1024, 8),
        ),
    },
    "int4": {
        "GATE_UP_LAUNCH_CONFIG": (
            (4, 256, 4), (8, 256, 4), (8, 256, 8), (4, 256, 2), (2, 256, 2), (16, 256, 8),
            (8, 128, 4), (16, 256, 4), (8, 64, 2), (16, 64, 4),
        ),
        "DOWN_LAUNCH_CONFIG": (
            (4, 32, 4), (8, 32, 4), (16, 32, 4), (4, 32, 2), (8, 32, 8), (2, 128, 4), (4, 128, 4),
            (4, 128, 8), (2, 32, 2), (1, 128, 4),
        ),
    },
}  # fmt: skip
# rows, columns, stages, warps by tokens of a tile
GROUPED: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    16: (
        (64, 128, 4, 4), (64, 128, 3, 4), (32, 128, 4, 4), (64, 256, 3, 4), (128, 64, 4, 4),
        (32, 256, 4, 4), (128, 128, 3, 8), (64, 64, 5, 4),
    ),
    32: ((64, 128, 3, 4), (64, 128, 4, 4), (128, 64, 4, 8), (64, 64, 4, 4), (128, 64, 4, 4)),
    64: ((64, 64, 4, 4), (128, 64, 3, 4), (128, 64, 4, 8), (64, 128, 3, 4), (128, 64, 3, 8)),
    128: ((64, 64, 4, 4), (128, 64, 3, 8), (128, 64, 4, 8), (256, 64, 3, 8), (128, 64, 3, 4)),
}  # fmt: skip
GROUPED_INT4: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    16: ((64, 128, 4, 4), (128, 128, 4, 4), (64, 128, 3, 4), (128, 128, 3, 8), (128, 128, 4, 8)),
    32: ((64, 128, 4, 4), (128, 128, 4, 4), (128, 128, 3, 8), (64, 128, 3, 4)),
    64: ((64, 128, 3, 4), (128, 128, 3, 8), (128, 128, 3, 4), (64, 128, 4, 4)),
    128: ((64, 128, 3, 4), (128, 128, 3, 8), (64, 128, 3, 8)),
}
GROUPED_E2M1: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    16: ((64, 128, 4, 4), (64, 64, 5, 4), (64, 256, 3, 4), (128, 128, 3, 8), (32, 256, 3, 4)),
    32: ((64, 128, 4, 4), (64, 64, 5, 4), (128, 128, 3, 8)),
    64: ((64, 128, 3, 4), (128, 128, 3, 8), (128, 64, 4, 8), (64, 64, 4, 4), (128, 128, 3, 4)),
    128: ((128, 64, 4, 8), (128, 128, 3, 8), (64, 64, 4, 4), (128, 64, 3, 4)),
}
DECODE["mxfp4"] = {
    "GATE_UP_LAUNCH_CONFIG_E2M1": (
        (8, 128, 4), (4, 128, 4), (4, 128, 2), (8, 128, 2), (16, 128, 8), (8, 128, 8), (4, 64, 1),
        (8, 64, 4), (4, 512, 4), (4, 512, 8),
    ),
    "DOWN_LAUNCH_CONFIG_E2M1": (
        (4, 128, 4), (8, 128, 4), (8, 128, 8), (4, 128, 8), (2, 128, 4), (2, 512, 4), (4, 64, 4),
        (8, 64, 4), (2, 128, 2), (4, 512, 8),
    ),
}  # fmt: skip
# constants of cuda/moe/grouped_gemm_wq.py
CUDA: dict[str, tuple[Any, ...]] = {
    "MAX_PAIRS_PER_EXPERT_BY_TOKEN_TILES": tuple(
        ((tiles, float("inf")),) for tiles in (1, 2, 3, 4)
    ),
    "BLOCKS_PER_SM": ((1,), (2,), (3,)),
    "PREFERRED_WARPS_PER_SM_RANGE": ((8, 8), (8, 16), (16, 24), (24, 32)),
    "MAX_STAGE_BYTES": (12 << 10, 32 << 10, 48 << 10),
    "MAX_STAGES": (3, 4, 6),
    "L2_REUSE_STAGES": (4, 16, 1 << 10),
}
FOUR_BITS = ("int4", "mxfp4")
SHAPES = {
    "qwen3-30b-a3b": moe_step.QWEN3_30B_A3B,
    "gpt-oss-20b": moe_step.MoEShape(24, 2880, 2880, 32, 4),
}


class ExpertsTimer:
    """Times the experts of all layers for some tokens."""

    def __init__(
        self, layers: Sequence[FusedMoE], shape: moe_step.MoEShape, tokens: int, kernel: str
    ) -> None:
        self._step = moe_step.make_step("cuda", kernel=kernel)
        self._x = moe_step.states(tokens, shape, "cuda")
        self._layers = layers
        self._routing = [
            route_tokens(cast(MoE, layer.plain), self._x, self._step) for layer in layers
        ]

    def microseconds(self) -> float:
        """Median of a layer."""

        def run() -> None:
            for layer, (weights, ids) in zip(self._layers, self._routing, strict=True):
                assert layer._stacked is not None, "a GPU's experts are stacked"
                layer._stacked.run(self._x, weights, ids, None, self._step.ops)

        run()
        (times,) = time_interleaved([capture_graph(run)], ROUNDS, 1, "cuda")
        return 1e6 * statistics.median(times) / len(self._layers)


@contextmanager
def grouped(
    module: Any, table: dict[int, Any], tokens: int, tiles: tuple[Any, Any]
) -> Iterator[None]:
    """Sorted tiles of so many tokens, whatever there are."""
    with (
        mock.patch.dict(table, {tokens: tiles}),
        mock.patch.object(module, "_tokens_per_tile", return_value=tokens),
        mock.patch.object(experts, "uses_pair_kernel", return_value=False),
        mock.patch.object(int4_fused_moe, "uses_pair_kernel", return_value=False),
    ):
        yield


def candidates(name: str, tokens: int, shape: moe_step.MoEShape) -> Iterator[tuple[str, Any]]:
    """(what is tried, the context that makes it so); first what is chosen today."""
    yield "default", nullcontext()
    decode = moe_decode_int4 if name in FOUR_BITS else moe_decode
    few = mock.patch.object(decode, "DECODE_CONFIG_MAX_TOKENS", 1 << 30)
    if tokens <= 16:
        for few_constant, few_tiles in DECODE[name].items():
            several = f"{few_constant}_8_TOKENS"
            constant = several if tokens > 4 and hasattr(decode, several) else few_constant
            for tile in few_tiles if tokens <= 2 else few_tiles[:3]:
                yield f"pairs {constant} {tile}", _all_of(
                    few, mock.patch.object(decode, constant, tile),
                    mock.patch.object(experts, "uses_pair_kernel", return_value=True),
                    mock.patch.object(int4_fused_moe, "uses_pair_kernel", return_value=True),
                )  # fmt: skip
    average = tokens * shape.top_k / shape.experts
    module: Any = grouped_gemm_int4 if name in FOUR_BITS else grouped_gemm
    today = grouped_gemm_int4.LAUNCH_CONFIGS_E2M1 if name == "mxfp4" else module.LAUNCH_CONFIGS
    tried: dict[str, Any] = {"mxfp4": GROUPED_E2M1, "int4": GROUPED_INT4}
    for size, tiles in tried.get(name, GROUPED).items():
        if size / 4 <= max(average, 4) <= size * 4 and tokens > 1:
            for tile in tiles:
                made: Any = tile if name in FOUR_BITS else GroupedLaunchConfig(size, *tile)
                first, second = today.get(size, (made, made))
                for label, pair in (("gate_up", (made, second)), ("down", (first, made))):
                    yield f"tiles {label} {size} {tile}", grouped(module, today, size, pair)


def cuda_candidates() -> Iterator[tuple[str, Any]]:
    """The same for the CUDA kernel."""
    yield "default", _constant("MAX_STAGES", grouped_gemm_wq.MAX_STAGES)
    for name, values in CUDA.items():
        for value in values:
            yield f"{name} {value}", _constant(name, value)


@contextmanager
def _constant(name: str, value: Any) -> Iterator[None]:
    """Another value of a constant, by which configs are chosen."""
    caches = (grouped_gemm_wq.select_config, grouped_gemm_wq.select_config_pair)
    with mock.patch.object(grouped_gemm_wq, name, value):
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


@contextmanager
def _all_of(*contexts: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@torch.inference_mode()
def main(words: Sequence[str] | None = None) -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--format", action="append", choices=DECODE)
    parser.add_argument("--tokens", action="append", type=int)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kernel", default="triton", choices=("triton", "cuda"))
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    options = parser.parse_args(words)
    shape = replace(SHAPES[options.shape], layers=options.layers)
    row: dict[str, Any]
    for name in options.format or DECODE:
        layers = moe_step.make_layers(shape, name, "cuda")
        for tokens in options.tokens or TOKENS:
            states = moe_step.states(tokens, shape, "cuda")
            if not moe_step.is_served(layers[0], states, options.kernel):
                row = {"format": name, "tokens": tokens, "failed": f"{options.kernel}: not served"}
                print(json.dumps(row), flush=True)
                continue
            timer = ExpertsTimer(layers, shape, tokens, options.kernel)
            tried = (
                cuda_candidates() if options.kernel == "cuda" else candidates(name, tokens, shape)
            )
            for label, context in tried:
                row = {"format": name, "tokens": tokens, "tile": label}
                try:
                    with context:
                        row["us"] = round(timer.microseconds(), 2)
                except Exception as error:  # a tile that does not fit is a result, too
                    row["failed"] = " ".join(str(error).split())[:120]
                print(json.dumps(row), flush=True)
        del layers


if __name__ == "__main__":
    main()
