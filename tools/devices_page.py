"""``python -m tools.devices_page``: write docs/devices.md, which kernels a GPU gets.

Every cell is the answer of the package's own selection (``registry.select_backends``,
``unavailable_reason``
and ``supports``) on a fake GPU of that generation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from modelmill.ops import registry
from modelmill.ops.paged_attention import PagedAttentionInputs
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.triton.common import device
from modelmill.ops.w8a8_linear import Linear8BitInputs
from tools import generated_page
from tools.gpu_generations import GENERATIONS, GpuGeneration, device_function, fake_gpu

PAGE = Path("docs/devices.md")
AMD, HIP = "AMD", "6.4"
BACKENDS = {"cuda": "CUDA C++", "triton": "Triton", "torch": "torch"}
TEXT = """<!-- Made by `make devices` from the kernels' own code. -->

# GPU generations

Which kernels a GPU gets. `modelmill doctor` prints the same for the GPU at hand, with the reason for every kernel that is
not offered. [Kernels](kernels.md) says what each of them computes.

{generations}

* **CUDA C++** kernels use instructions that Hopper alone has (`wgmma`, TMA, `setmaxnreg`), so they are compiled for `sm_90a`
  and offered there only. Arguments that they do not support go to the Triton kernel of the same op.
* **Triton** kernels run from compute capability 8.0 on. They choose tiles and stages by the GPU's shared memory: with heads of
  129 to 256 channels, for example, a tile of prefill attention reads
  {prefill}.
  `make test-all` compiles every variant that can be chosen for each of these generations, down to machine code, and compares its
  shared memory with the limit (`python -m tools.compile_triton sm_86` prints them).
* **fp8** (e4m3) needs compute capability 8.9. On older GPUs the torch reference computes with fp8 weights and fp8 KV caches,
  which is slow: choose `int8` there.
* **PDL** (programmatic dependent launch) lets a kernel load weights while the previous one ends.
* **AMD**: torch calls AMD's GPUs "cuda". Kernels with NVIDIA's PTX instructions or PDL are not offered there, and `doctor`
  says so; the torch reference computes these ops. Nothing was measured on an AMD GPU.

## Ops

The backend that is tried first; a fused op that no backend implements ("–") is computed by the ops that it replaces.

{ops}

## fp8

Whether the Triton kernel serves it:

{fp8}
"""  # noqa: E501


def render() -> dict[Path, str]:
    """The page by its path below the repository."""
    return {
        PAGE: TEXT.format(
            generations=_generations(), ops=_ops(), fp8=_fp8(), prefill=_prefill_keys()
        )
    }


def _generations() -> str:
    rows = []
    for each in GENERATIONS:
        with fake_gpu(each):
            gpu = torch.device("cuda", 0)
            facts = [device_function(f, gpu) for f in (device.supports_fp8, device.supports_pdl)]
            backends = set(registry.select_backends("cuda").backends.values()) - {"torch"}
        rows.append(
            [
                f"`{each.arch}`", f"{each.name}: {each.examples}", f"{each.shared_kib} KiB",
                " and ".join(BACKENDS[name] for name in sorted(backends)), *map(_yes, facts),
            ]
        )  # fmt: skip
    head = ["compute capability", "GPUs", "shared memory of a block", "kernels", "fp8", "PDL"]
    return _table(head, rows)


def _ops() -> str:
    columns = {each.arch: _backends(each) for each in GENERATIONS}
    columns[AMD] = _backends(GENERATIONS[0], HIP)
    return _table(
        ["op", *columns],
        [[f"`{op}`", *(column[op] for column in columns.values())] for op in registry.op_names()],
    )


def _backends(generation: GpuGeneration, hip: str | None = None) -> dict[str, str]:
    """The selected backend of each op, as it is shown."""
    with fake_gpu(generation, hip):
        ops = registry.select_backends("cuda")
        return {
            op: "–" if getattr(ops, op) is None else BACKENDS[backend]
            for op, backend in ops.backends.items()
        }


def _fp8() -> str:
    rows = []
    for name, serves in FP8_USES.items():
        cells = []
        for each in GENERATIONS:
            with fake_gpu(each):
                cells.append(_yes(serves()))
        rows.append([name, *cells])
    return _table(["use", *(each.arch for each in GENERATIONS)], rows)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _serves_fp8_linear() -> bool:
    weight, scale = _empty(64, 64, dtype=torch.float8_e4m3fn), _empty(64, dtype=torch.float32)
    inputs = Linear8BitInputs(_empty(1, 64), weight, scale, None, torch.bfloat16)
    return registry.backend_serves_args("fp8_linear", "triton", inputs)


def _serves_fp8_activations() -> bool:
    spec = ActQuantSpec(torch.float8_e4m3fn)
    return registry.backend_serves_args(
        "rms_norm_quant", "triton", _empty(1, 64), _empty(64), 1e-6, spec
    )


def _serves_fp8_pages() -> bool:
    return registry.backend_serves_args(
        "paged_attention", "triton", paged_inputs(64, torch.float8_e4m3fn)
    )


FP8_USES: Mapping[str, Callable[[], bool]] = {
    "fp8 weights (`fp8_linear`)": _serves_fp8_linear,
    "fp8 activations (`rms_norm_quant`, `silu_mul_quant`, …)": _serves_fp8_activations,
    "fp8 KV cache (`paged_attention`, `rope_cache`)": _serves_fp8_pages,
}


def paged_inputs(dim: int, stored: torch.dtype) -> PagedAttentionInputs:
    """One prompt of 4,096 bfloat16 tokens, heads of ``dim`` channels."""
    pages = _empty(256, 8, 16, dim, dtype=stored)
    scale = None if stored == torch.bfloat16 else _empty(256, 8, 16, dtype=torch.float32)
    index = _empty(1, 256, dtype=torch.int32)
    return PagedAttentionInputs(
        _empty(4096, 8, dim), pages, pages, index, index[0, :2], index[0, :1], 4096, 4096, 1.0,
        None, scale, scale,
    )  # fmt: skip


def _prefill_keys() -> str:
    """How many keys a tile of prefill attention with heads of 256 channels reads, per GPU."""
    from modelmill.ops.triton.attention import paged_attention

    inputs = paged_inputs(256, torch.bfloat16)
    keys: dict[int, list[str]] = {}
    for each in GENERATIONS:
        with fake_gpu(each):
            tile = paged_attention._select_prefill_tile(
                (4096, 4096), 8, 256, inputs.q, inputs.k_cache
            )
        keys.setdefault(tile[1], []).append(f"`{each.arch}`")
    return " and ".join(f"{count} keys at a time on {_list(on)}" for count, on in keys.items())


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; with ``--check`` only say whether it is stale."""
    return generated_page.run_pages(argv, __doc__, "devices", lambda _: render())


if __name__ == "__main__":
    sys.exit(main())
