"""Kernels specialized on the sizes of a step: warm-up compiles all that a server can use."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.types import Request, SamplingParams
from modelmill.ops import registry
from modelmill.runtime.batch import PackedBatch
from modelmill.runtime.cuda_graphs import LOGITS_GRAPH_OUTPUT, SAMPLED_GRAPH_OUTPUT
from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.graph_sizes import context_bucket, graph_batch_sizes
from tests.runtime import tiny

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip(
        "these tests record launches instead of interpreting kernels", allow_module_level=True
    )

from triton.runtime import interpreter

from modelmill.ops.triton.attention import paged_attention, paged_decode
from modelmill.ops.triton.attention.score_mods import KernelScoreMods
from modelmill.ops.triton.common import device, launch_configs, pdl
from modelmill.ops.triton.norm_quantize import norm_quant, silu_mul

Q_CACHE_DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.int8),
]


class LaunchRecorder:
    """A kernel that only records the constants of its launches."""

    def __init__(self, name: str, met: set[Any]) -> None:
        self._name, self._met = name, met

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **constants: self._met.add((self._name, tuple(sorted(constants.items()))))


@contextmanager
def launch_recorder() -> Iterator[set[Any]]:
    """Record launches of the decode kernels, with the grids of an H200."""
    met: set[Any] = set()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("paged_decode_kernel", "grouped_paged_decode_kernel", "merge_splits_kernel"):
            patch.setattr(paged_decode, name, LaunchRecorder(name, met))
        patch.setattr(paged_attention, "sm_count", lambda device: 132)
        patch.setattr(pdl, "supports_pdl", lambda device: True)
        yield met


@given(
    heads=st.sampled_from([(32, 32), (32, 8), (12, 12), (14, 2), (71, 1)]),
    dtypes=st.sampled_from(Q_CACHE_DTYPES),
    bounds=st.tuples(st.integers(1, 96), st.integers(1, 9000), st.none() | st.integers(1, 5000)),
    steps=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20),
)
@settings(max_examples=60, deadline=None)
def test_forms_are_all_that_a_step_can_meet(
    heads: Any, dtypes: Any, bounds: Any, steps: Any
) -> None:
    most, longest, window = bounds
    q, k = (
        torch.empty((most, heads[0], 64), dtype=dtypes[0]),
        torch.empty((2, heads[1], 16, 64), dtype=dtypes[1]),
    )
    scale = q if dtypes[0] == dtypes[1] else torch.empty(1)

    def variants_for(batch: int, context: int) -> set[Any]:
        launched_variants.clear()
        tables, starts = (
            torch.zeros((batch, 4), dtype=torch.int32),
            torch.zeros(batch + 1, dtype=torch.int32),
        )
        # the queries are passed as scales where there are none
        first = q[:batch]
        scales = (first if scale is q else scale,) * 2
        paged_attention._decode(
            (first, k, k, *scales, tables, starts, starts, first),
            KernelScoreMods.from_score_mods(None, first), context, 1.0, window,
        )  # fmt: skip
        return set(launched_variants)

    with launch_recorder() as launched_variants:
        listed = paged_attention.warmup_sizes(q, k, most, longest, window)
        assert all(1 <= batch <= most and 1 <= context <= longest for batch, context in listed)
        known = set().union(*(variants_for(*sizes) for sizes in listed))
        for a, b in steps:
            assert variants_for(1 + int(a * (most - 1)), 1 + int(b * (longest - 1))) <= known


class Eager:
    """Stands for CUDA graphs: runs the step, padded as a graph would be."""

    def __init__(self, loop: EngineCore, largest: int) -> None:
        self._runner, self.sizes, self.max_seqs = (
            loop.model_runner,
            graph_batch_sizes(largest),
            largest,
        )
        self._longest = loop.max_model_len

    def padded_shape(self, seqs: int, context: int) -> tuple[int, int]:
        return next(size for size in self.sizes if size >= seqs), min(
            context_bucket(context), max(self._longest, context)
        )

    def replay(self, batch: PackedBatch, graph_output: str) -> torch.Tensor:
        runner = self._runner
        logits = runner.forward(batch)
        if graph_output == LOGITS_GRAPH_OUTPUT:
            return logits
        ids = runner.sampler.select_ids(
            logits,
            batch.views.sampling_inputs(len(logits))
            if graph_output == SAMPLED_GRAPH_OUTPUT
            else None,
        )
        runner.last_ids[batch.views.keep_slots] = ids
        return ids


def service(patch: pytest.MonkeyPatch, met: set[Any]) -> EngineCore:
    """An engine core that launches Triton's kernels as on a GPU; launches are only recorded."""

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        values = dict(zip(kernel.arg_names, args)) | named
        annotations = kernel.fn.__annotations__
        constants = {
            n: v
            for n, v in values.items()
            if "constexpr" in str(annotations.get(n)) or n not in kernel.arg_names
        }
        met.add(
            (kernel.fn.__module__, kernel.fn.__name__, tuple(sorted(constants.items(), key=str)))
        )

    patch.setattr(interpreter.InterpretedFunction, "run", launch)
    patch.setitem(registry.BACKEND_PREFERENCE, "cpu", ("triton", "torch"))
    for module in (device, norm_quant, paged_attention, silu_mul, launch_configs):
        patch.setattr(module, "sm_count", lambda device: 132)
    patch.setattr(pdl, "supports_pdl", lambda device: True)
    # kernels that are not run leave garbage, but ids must be valid
    kernels = {"argmax": "torch", "sample": "torch"}
    loop = tiny.make_engine(
        overlap=True, kernels=kernels, max_num_seqs=24, max_num_batched_tokens=256
    )
    loop.scheduler.optimize_inter_token_latency(None, on_gpu=True)
    loop.model_runner.keep_last_ids = True
    loop.model_runner.decode_graphs = Eager(loop, 24)  # type: ignore[assignment]
    return loop


interpreted = pytest.mark.skipif(not device.INTERPRETED, reason="Triton's interpreter is off")


@interpreted
@pytest.mark.parametrize("seed", range(3))
def test_no_step_of_a_service_meets_a_kernel_that_warming_up_did_not(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Requests that come one after another join running answers: 7 kernels were compiled then, 1.5
    s on one core.
    """
    met: set[Any] = set()
    loop, rng = service(monkeypatch, met), random.Random(seed)
    loop.warm_up(all_specializations=True)
    known = set(met)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [
        tuple(rng.randrange(2, tiny.VOCAB) for _ in range(rng.randrange(1, 100))) for _ in range(40)
    ]
    waiting = [Request(id=str(i), prompt=prompt, params=params) for i, prompt in enumerate(prompts)]
    while waiting or loop.has_work:
        for _ in range(rng.randrange(3)):
            if waiting:
                loop.add(waiting.pop())
        loop.step()
    assert len(known) > 20
    assert met - known == set()


@interpreted
def test_without_the_forms_some_are_met_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test can fail."""
    met: set[Any] = set()
    loop = service(monkeypatch, met)
    loop.warm_up()
    known = set(met)
    for count in (50, 60, 70, 80, 90):
        loop.add(
            Request(
                id=str(count),
                prompt=(3,) * count,
                params=SamplingParams(temperature=0.0, max_tokens=9),
            )
        )
        loop.step()
    while loop.has_work:
        loop.step()
    assert met - known
