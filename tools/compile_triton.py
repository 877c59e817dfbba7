"""``python -m tools.compile_triton [sm_86]``: compile every Triton kernel variant, without a GPU.

The package's own launch code runs on tensors without memory (``triton_problems``) and chooses as on
the GPU; Triton compiles what it would launch there, down to the machine code. Printed: one JSON
line per variant with the shared memory that it needs, or why it does not compile. Exit code 1 if a
variant fails or needs more shared memory than the GPU has.

Generations of one major compute capability run the same passes of Triton's, and a later one takes
the PTX of an earlier one: behind the first of them, each kernel is compiled once per combination of
dtypes, and other variants of it that the first one compiled have the shared memory that they have
there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any
from unittest import mock

# read when Triton and the package are imported: interpreted kernels are not compiled
os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from tools.gpu_generations import GENERATIONS, GpuGeneration, fake_gpu, kernel_modules
from tools.triton_problems import problems

PREFIX = "modelmill.ops.triton."
WARP_SIZE = 32
MAX_ERROR = 300
CHOICES = ("_config", "_tile", "_stages", "plan_row_launch", "plan_elementwise_launch")
TEXTS = ("ASM", "CONSTRAINTS")  # constexprs that hold PTX
VariantKey = tuple[object, ...]


@dataclass(frozen=True)
class CompiledVariant:
    """A kernel compiled for a GPU.

    Attributes:
        arch: of the GPU.
        kernel: module and function, below modelmill.ops.triton.
        op: the op whose call chose it first.
        constants: its constexprs and launch options.
        shared: bytes of shared memory; None if it does not compile.
        seconds: of this process that it took.
        error: why it does not compile, or None.
    """

    arch: str
    kernel: str
    op: str
    constants: str
    shared: int | None
    seconds: float
    error: str | None = None


class _CompilingDriver:
    """What Triton asks a driver when it compiles."""

    def __init__(self, generation: GpuGeneration) -> None:
        major, minor = generation.capability
        self._target = GPUTarget("cuda", 10 * major + minor, WARP_SIZE)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        """Another number for each generation: Triton keeps the target by it."""
        return int(self._target.arch)

    def get_current_stream(self, _device: int) -> int:
        return 0


class LaunchRecorder:
    """Takes the launches of kernels: keeps each variant once, compiled if ``compiles``.

    shared_bytes: of variants that generations of the same major capability compiled; gets those
    that this one compiles.
    """

    def __init__(
        self,
        generation: GpuGeneration,
        *,
        compiles: bool,
        shared_bytes: MutableMapping[VariantKey, int] | None = None,
    ) -> None:
        self.generation = generation
        self.compiles = compiles
        self.op = ""
        self.variants: dict[VariantKey, CompiledVariant] = {}
        self._shared_bytes = {} if shared_bytes is None else shared_bytes
        self._compiled: set[VariantKey] = set()  # kernels and the dtypes of their tensors
        self._run = jit.JITFunction.run

    def launch(self, kernel: Any, *args: Any, grid: Any, **named: Any) -> None:
        """In the place of ``JITFunction.run``."""
        named.pop("warmup", None)
        parameters = dict(zip(kernel.arg_names, args, strict=False)) | named
        constants = {
            name: value
            for name, value in parameters.items()
            if name not in kernel.arg_names
            or kernel.params[kernel.arg_names.index(name)].is_constexpr
        }
        dtypes = [t.dtype for t in parameters.values() if isinstance(t, torch.Tensor)]
        name = f"{kernel.fn.__module__.removeprefix(PREFIX)}.{kernel.fn.__name__}"
        key = (name, *dtypes, *constants.items())
        if key in self.variants:
            return
        shown = [each for each in constants if each not in TEXTS]
        text = ", ".join(f"{each}={constants[each]}" for each in shown)
        shared, error, began = None, None, time.process_time()
        if self.compiles and (name, *dtypes) in self._compiled:
            shared = self._shared_bytes.get(key)
        if self.compiles and shared is None:
            self._compiled.add((name, *dtypes))
            try:
                shared = self._run(kernel, *args, grid=grid, warmup=True, **named).metadata.shared
                self._shared_bytes[key] = shared
            except Exception as problem:  # Triton's and ptxas's errors have no common class
                error = " ".join(str(problem).split())[:MAX_ERROR] or type(problem).__name__
        seconds = round(time.process_time() - began, 2)
        arch = self.generation.arch
        self.variants[key] = CompiledVariant(arch, name, self.op, text, shared, seconds, error)


def find_variants(
    generation: GpuGeneration,
    *,
    compiles: bool = True,
    shared_bytes: MutableMapping[VariantKey, int] | None = None,
) -> list[CompiledVariant]:
    """Every variant that may be launched on this GPU, each once; arguments of LaunchRecorder."""
    recorder = LaunchRecorder(generation, compiles=compiles, shared_bytes=shared_bytes)

    def launch(kernel: Any, *args: Any, **named: Any) -> None:
        recorder.launch(kernel, *args, **named)

    driver.set_active(_CompilingDriver(generation))
    with fake_gpu(generation), mock.patch.object(jit.JITFunction, "run", launch):
        for op, call in problems():
            recorder.op = op
            call()
    return list(recorder.variants.values())


def failures(
    variants: Sequence[CompiledVariant], generation: GpuGeneration
) -> list[CompiledVariant]:
    """The variants that do not compile, or do not fit into a block's shared memory."""
    return [
        variant
        for variant in variants
        if variant.shared is None or variant.shared > generation.shared_bytes
    ]


class ChoiceLines:
    """The lines of the functions that choose launch configs, and which of them ran."""

    def __init__(self) -> None:
        self._all: dict[CodeType, set[int]] = {}
        self._ran: dict[CodeType, set[int]] = {}
        for module in kernel_modules():
            for name, function in vars(module).items():
                if name.endswith(CHOICES) and isinstance(function, FunctionType):
                    code = function.__code__
                    first = code.co_firstlineno
                    lines = {line for *_, line in code.co_lines() if line is not None}
                    if module.__name__.startswith(PREFIX):
                        self._all[code] = lines - {first}

    def trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        """For ``sys.settrace``."""
        if frame.f_code not in self._all:
            return None
        if event == "line":
            self._ran.setdefault(frame.f_code, set()).add(frame.f_lineno)
        return self.trace

    def unreached(self) -> list[str]:
        """``function:line`` of every line that did not run."""
        return [
            f"{Path(code.co_filename).name}:{line} ({code.co_name})"
            for code, lines in self._all.items()
            for line in sorted(lines - self._ran.get(code, set()))
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the variants; 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("arch", type=_generation, nargs="*", help="such as sm_86; default: all")
    parser.add_argument(
        "--list", action="store_true", help="compile nothing; also print choices that none reaches"
    )
    options = parser.parse_args(argv)
    generations = options.arch or GENERATIONS
    if options.list:
        return _list_variants(generations)
    failed = 0
    shared_bytes: defaultdict[int, dict[VariantKey, int]] = defaultdict(dict)  # by major capability
    gc.freeze()  # what imports made
    gc.set_threshold(50_000)  # 700 by default: a tenth of the seconds
    with tempfile.TemporaryDirectory(prefix="modelmill-triton-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for generation in generations:
            variants = find_variants(
                generation, shared_bytes=shared_bytes[generation.capability[0]]
            )
            failed += len(failures(variants, generation))
            for variant in variants:
                print(json.dumps(asdict(variant)), flush=True)
    return 1 if failed else 0


def _generation(arch: str) -> GpuGeneration:
    by_arch = {generation.arch: generation for generation in GENERATIONS}
    if arch not in by_arch:
        raise argparse.ArgumentTypeError(f"unknown: {arch}; known: {', '.join(by_arch)}")
    return by_arch[arch]


def _list_variants(generations: Sequence[GpuGeneration]) -> int:
    lines = ChoiceLines()
    sys.settrace(lines.trace)
    for generation in generations:
        for variant in find_variants(generation, compiles=False):
            print(json.dumps(asdict(variant)))
    sys.settrace(None)
    unreached = lines.unreached()
    print(json.dumps({"unreached": unreached}))
    return 1 if unreached else 0


if __name__ == "__main__":
    sys.exit(main())
