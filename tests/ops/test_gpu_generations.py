"""Kernels of every GPU generation, without a GPU: each variant fits, and each choice is reached.

Triton's interpreter, in which the other tests run, has no shared memory; so a process without it
compiles what the launch code chooses (``tools.compile_triton``).
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from modelmill.ops import registry
from modelmill.ops.image_attention import ImageAttentionInputs
from modelmill.ops.triton.attention import paged_attention, paged_latent, relative_attention
from modelmill.ops.triton.norm_quantize import norm_quant
from tests.source_files import parse
from tools.gpu_generations import GENERATIONS, GpuGeneration, fake_gpu

ROOT = Path(__file__).resolve().parents[2]
TRITON = ROOT / "modelmill/ops/triton"
BY_ARCH = {generation.arch: generation for generation in GENERATIONS}
SMALL, LARGE = BY_ARCH["sm_86"], BY_ARCH["sm_90"]
Variants = Future[list[dict[str, Any]]]
PTX_OR_PDL = ("inline_asm_elementwise", "launch_pdl", "triton.language.extra.cuda")


def compile_triton(*arguments: str) -> list[dict[str, Any]]:
    """What the tool prints."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tools.compile_triton", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Variants]]:
    """The variants of each generation that a selected test names.

    One process compiles those of a major compute capability, since they share most of what they
    find. Two compile at a time, for two minutes and more: make test-all ends with these tests, when
    other parts leave a core idle.
    """
    names = [item.name for item in request.session.items]
    archs_by_major: defaultdict[int, list[str]] = defaultdict(list)
    for arch, generation in BY_ARCH.items():
        if any(name.endswith(f"[{arch}]") for name in names):
            archs_by_major[generation.capability[0]].append(arch)
    with ThreadPoolExecutor(2) as pool:
        variants = {
            arch: future
            for archs in archs_by_major.values()
            for future in [pool.submit(compile_triton, *archs)]
            for arch in archs
        }
        yield variants
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("arch", BY_ARCH)
def test_every_variant_compiles_and_fits_into_shared_memory(
    arch: str, compiled: Mapping[str, Variants]
) -> None:
    limit = BY_ARCH[arch].shared_bytes
    variants = [each for each in compiled[arch].result() if each["arch"] == arch]
    assert len(variants) > 150
    assert [
        variant for variant in variants if variant["shared"] is None or variant["shared"] > limit
    ] == []
    assert max(variant["shared"] for variant in variants) > 90 << 10, (
        "the largest ones are among them"
    )


def test_the_launch_code_of_one_generation_launches_every_kernel() -> None:
    *variants, _ = compile_triton("--list", "sm_90")
    assert launched_kernels() - {variant["kernel"] for variant in variants} == set()


def test_the_compiled_forms_cover_every_kernel_and_every_choice_of_a_launch_config() -> None:
    *variants, last = compile_triton("--list")
    assert last == {"unreached": []}
    *alone, _ = compile_triton("--list", "sm_120")
    chosen = [each["constants"] for each in variants if each["arch"] == "sm_120"]
    assert chosen == [each["constants"] for each in alone], "those of the GPUs before"
    for arch in BY_ARCH:
        compiled = {variant["kernel"] for variant in variants if variant["arch"] == arch}
        assert launched_kernels() - compiled == set()


def launched_kernels() -> set[str]:
    """``folder.module.kernel`` of every kernel that a module launches itself or by a launcher."""
    trees = {path: parse(path) for path in TRITON.rglob("*.py")}
    called = {  # by other kernels, as device functions
        node.func.id
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    names = set()
    for path, tree in trees.items():
        kernels = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
        }
        prefix = ".".join(path.relative_to(TRITON).with_suffix("").parts)
        names |= {f"{prefix}.{kernel}" for kernel in kernels - called}
    return names


def test_the_launched_kernels_are_those_that_a_reader_finds() -> None:
    kernels = launched_kernels()
    assert "attention.paged_prefill.paged_prefill_kernel" in kernels
    assert "common.pdl.pdl_wait_and_trigger" not in kernels, "a device function"


@pytest.mark.parametrize(("generation", "keys"), [(SMALL, 32), (LARGE, 64)])
def test_prefill_of_wide_heads_reads_fewer_keys_where_shared_memory_is_small(
    generation: GpuGeneration, keys: int
) -> None:
    q = torch.empty(1, 1, 256, dtype=torch.bfloat16)
    with fake_gpu(generation):
        tile = paged_attention._select_prefill_tile((4096, 4096), 8, 256, q, q)
    assert tile[:2] == (64, keys)


def test_a_group_of_heads_that_does_not_fit_is_computed_head_by_head() -> None:
    pages = torch.empty(4, 1, 16, 256, dtype=torch.bfloat16, device="meta")
    grouped = []
    for heads in (8, 128, 256):
        q = torch.empty(1, heads, 256, dtype=torch.bfloat16, device="meta")
        with fake_gpu(SMALL):
            config = paged_attention._decode_config(q, pages, 1, 64)
        grouped.append((config.group_heads, config.tile[0]))
    assert grouped == [(True, 64), (True, 16), (False, 0)]


def test_latent_rows_are_64_where_wgmma_reads_them_from_shared_memory() -> None:
    pages = torch.empty(4, 1, 16, 576, dtype=torch.bfloat16, device="meta")
    for generation in GENERATIONS:
        tiles = []
        for heads in (16, 128):
            q = torch.empty(1, heads, 576, dtype=torch.bfloat16, device="meta")
            with fake_gpu(generation):
                tiles.append(paged_latent._select_latent_launch_config(q, pages, 1))
        assert tiles[0].rows == 16
        assert tiles[1].rows == (64 if generation.arch == "sm_90" else 32)


def test_global_attention_keeps_fewer_rows_of_keys_where_shared_memory_is_small() -> None:
    qkv = torch.empty(1, 128, 128, 3, 1, 128, dtype=torch.bfloat16, device="meta")
    stages = []
    for generation in (SMALL, LARGE):
        with fake_gpu(generation):
            stages.append(relative_attention._global_config(qkv)[3])
    assert stages == [2, 3]


def test_windows_whose_offsets_do_not_fit_go_to_the_reference() -> None:
    served = {}
    for side in (14, 64, 96, 160, 300):
        rel = torch.empty(2 * side - 1, 128, dtype=torch.bfloat16, device="meta")
        qkv = torch.empty(1, side, side, 3, 1, 128, dtype=torch.bfloat16, device="meta")
        inputs = ImageAttentionInputs(qkv, 1, None, None, rel, rel)
        for generation in (SMALL, LARGE):
            with fake_gpu(generation):
                serves = registry.backend_serves_args("image_attention", "triton", inputs)
            served[side, generation.arch] = serves
    assert {side for side, arch in served if served[side, arch]} == {14, 64, 96, 160}
    assert not served[160, "sm_86"]


def test_wide_permuted_rows_are_loaded_in_fewer_stages_and_never_beyond_shared_memory() -> None:
    gpu, row_bytes = torch.device("cuda", 0), 8  # x and residual in float32
    with fake_gpu(SMALL):
        assert norm_quant._num_stages(16384, row_bytes, True, gpu) == 1
        assert norm_quant._num_stages(4096, row_bytes, True, gpu) == 3
        assert norm_quant._permutation_shared_bytes(32768) > SMALL.shared_bytes
    with fake_gpu(LARGE):
        assert norm_quant._num_stages(16384, row_bytes, True, gpu) == 2


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_kernels_with_ptx_or_pdl_are_not_offered_on_amd(backend: str) -> None:
    with fake_gpu(LARGE, hip="6.4"):
        reasons = {
            op: module.unavailable_reason("cuda")
            for op in registry.op_names()
            for module in registry.implementations(op, [backend]).values()
        }
    offered = {op for op, reason in reasons.items() if reason is None}
    assert offered == (set() if backend == "cuda" else without_ptx_or_pdl())
    assert all("AMD" in reason for reason in reasons.values() if reason is not None)


def test_without_amd_all_of_them_are_offered() -> None:
    with fake_gpu(LARGE):
        for op in registry.op_names():
            for module in registry.implementations(op, ["cuda", "triton"]).values():
                assert module.unavailable_reason("cuda") is None, op


def without_ptx_or_pdl() -> set[str]:
    """Ops whose Triton module, and all Triton modules that it imports, have neither."""
    return {
        op
        for op in registry.op_names()
        for module in registry.implementations(op, ["triton"]).values()
        if not any(word in text for text in _sources(module.__name__) for word in PTX_OR_PDL)
    }


@cache
def _sources(module: str) -> Sequence[str]:
    """Text of a Triton module and of those that it imports, directly or not."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    if not module.startswith("modelmill.ops.triton.") or not path.is_file():
        return ()
    texts = [path.read_text()]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            texts += _sources(node.module)
            for each in node.names:
                texts += _sources(f"{node.module}.{each.name}")
    return texts
