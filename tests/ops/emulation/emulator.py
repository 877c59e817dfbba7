"""Kernels of ops/cuda on a CPU: sources as they are, PTX translated (translate.py), launches as the
ops make them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from modelmill.ops.cuda.common import build, launch
from tests.ops.compile_cache import GXX, GXX_VERSION, compile_once
from tests.ops.emulation.translate import cluster_sizes, translate

HERE = Path(__file__).parent
HAS_FLOAT16 = int(GXX_VERSION.split(".")[0]) >= 12
CAN_EMULATE = HAS_FLOAT16 and sys.platform == "linux"  # elsewhere g++ may be another compiler
requires_emulation = pytest.mark.skipif(
    not CAN_EMULATE, reason="needs Linux with g++ 12 or newer: apt-get install g++"
)
FLAGS = (
    "-O1", "-std=c++17", "-ffp-contract=off", "-w", "-Wno-psabi", "-fPIC", f"-I{HERE}",
    "-fno-gnu-unique",  # kernels of one process have constants of one name and other values
)  # fmt: skip
MAX_SHARED_BYTES = 227 << 10
ORDERS = 6  # of events: a mistake may stay unseen in any one of them
Dims = tuple[int, ...]
BYTES = {
    torch.uint8: 1,
    torch.int8: 1,
    torch.int32: 4,
    torch.float16: 2,
    torch.bfloat16: 2,
    torch.float32: 4,
}


class EmulationError(Exception):
    """What the emulation saw that no GPU would forgive."""


@dataclass
class Emulator:
    """Compiles into ``folder``; ``change`` is made in the sources first, for mistakes that are to
    be seen.

    preceding_writes: of a launch by its name and arguments, what the kernel in front still reads or
    writes (address, bytes).
    """

    folder: Path
    change: tuple[str, str] | None = None
    num_sms: int = 2
    seed: int = 1
    preceding_writes: Callable[[str, tuple[bytes, ...]], list[tuple[int, int]]] = (
        lambda name, arguments: []
    )
    launched: list[tuple[str, int]] = field(default_factory=list)  # kernels and blocks

    def detects(self, change: tuple[str, str], correct: Callable[[], bool]) -> bool:
        """Whether ``correct`` is untrue, or the emulation itself fails, with the change made; in
        one of some orders.
        """
        self.change = change
        for self.seed in range(1, ORDERS + 1):
            try:
                if not correct():
                    return True
            except EmulationError:
                return True
        return False

    def library(self, source: str, macros: tuple[str, ...]) -> ctypes.CDLL:
        """``<source>.cu`` with all its kernels."""
        key = repr((source, macros, self.change)).encode()
        path = (
            self.folder / f"{source}-{hashlib.sha1(key, usedforsecurity=False).hexdigest()[:16]}.so"
        )
        if not path.exists():
            text = preprocessed(source, macros, self.sources())
            known = set(re.findall(r"inline void (\w+)\(How", (HERE / "ptx.h").read_text()))
            entries = (
                f"EMULATED({name}, {blocks})" for name, blocks in cluster_sizes(text).items()
            )
            code = path.with_suffix(".cpp")
            code.write_text("\n".join(('#include "ptx.h"', translate(text, known), *entries, "")))
            run_compiler(path, "-shared", code, *self.machine())
        return ctypes.CDLL(str(path))

    def machine(self) -> list[Path]:
        """What all libraries have in them."""
        objects = []
        for source in sorted(HERE.glob("*.cpp")):
            objects.append(self.folder / f"{source.stem}.o")
            if not objects[-1].exists():
                run_compiler(objects[-1], "-c", source)
        return objects

    def sources(self) -> Path:
        """The kernels' folder, or a copy with the change in it."""
        if self.change is None:
            return build.KERNEL_SOURCES_FOLDER
        old, new = self.change
        folder = (
            self.folder
            / hashlib.sha1(repr(self.change).encode(), usedforsecurity=False).hexdigest()[:16]
        )
        folder.mkdir(exist_ok=True)
        texts = {
            path.relative_to(build.KERNEL_SOURCES_FOLDER): path.read_text()
            for path in build.KERNEL_SOURCES_FOLDER.rglob("*.cu*")
        }
        # as it stands, else by its tokens: the sources are formatted by a program
        place = re.compile(re.escape(old))
        if not any(place.search(text) for text in texts.values()):
            words = re.findall(r"\w+|[^\w\s]", old)
            place = re.compile(r"\s*".join(re.escape(word) for word in words))
        if not any(place.search(text) for text in texts.values()):
            raise LookupError(f"no kernel has this in it any more: {old}")
        for name, text in texts.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(place.sub(lambda _: new, text))
        return folder

    def compile_and_load_kernel(
        self, source: str, name: str, macros: tuple[str, ...], threads: int, shared: int, *_: object
    ) -> EmulatedKernel:
        """As launch.compile_and_load_kernel; device and division of memory do not matter here."""
        assert shared <= MAX_SHARED_BYTES
        assert threads % 32 == 0
        function = getattr(self.library(source, macros), f"emulate_{name}")
        function.restype = ctypes.c_char_p
        return EmulatedKernel(self, name, functools.partial(function), threads, shared)


@dataclass(frozen=True)
class EmulatedKernel:
    """As launch.Kernel."""

    emulator: Emulator
    name: str
    function: functools.partial[bytes | None]
    threads: int
    shared: int

    def launch(self, blocks: int, *arguments: bytes, pdl: bool = False) -> None:
        """Raises Wrong."""
        self.emulator.launched.append((self.name, blocks))
        pointers = (ctypes.c_char_p * len(arguments))(*arguments)
        front = [
            number
            for stretch in self.emulator.preceding_writes(self.name, arguments)
            for number in stretch
        ]
        sizes = (ctypes.c_uint32 * 5)(
            blocks, self.threads, self.shared, self.emulator.seed, len(front) // 2
        )
        wrong = self.function(sizes, (ctypes.c_uint64 * len(front))(*front), pointers)
        if wrong is not None:
            raise EmulationError(wrong.decode())


def memory_ranges(*tensors: torch.Tensor | None) -> list[tuple[int, int]]:
    """Where contiguous tensors lie."""
    there = [t for t in tensors if t is not None]
    assert all(t.is_contiguous() for t in there)
    return [(t.data_ptr(), t.nbytes) for t in there]


def tensor_map(
    address: int, dtype: torch.dtype, sizes: Dims, strides: Dims, box: Dims, swizzled: bool = True
) -> bytes:
    """As launch.tensor_map, for async_copy.cpp: the demands of the driver, then the numbers as they
    are.
    """
    assert address % 16 == 0
    assert all(stride % 16 == 0 for stride in strides)
    assert max(box) <= 256
    assert box[0] * BYTES[dtype] % 16 == 0
    filled = ((*values, 1, 1, 1)[:count] for values, count in ((sizes, 4), (strides, 3), (box, 4)))
    return struct.pack(
        "=16Q", address, BYTES[dtype], swizzled, *(each for part in filled for each in part), 0, 0
    )


def mapped_range(argument: bytes) -> list[tuple[int, int]]:
    """Where a matrix lies of which a launch has a tensor map."""
    address, _, _, _, rows, _, _, stride = struct.unpack_from("=8Q", argument)
    return [(address, rows * stride)]


def replace_gpu(emulator: Emulator, patch: pytest.MonkeyPatch) -> None:
    """The ops' own Python launches on the emulator, with tensors on the CPU."""
    patch.setattr(launch, "compile_and_load_kernel", emulator.compile_and_load_kernel)
    patch.setattr(launch, "tensor_map", tensor_map)
    patch.setattr(launch, "sm_count", lambda device: emulator.num_sms)
    patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def preprocessed(
    name: str, macros: tuple[str, ...], folder: Path = build.KERNEL_SOURCES_FOLDER
) -> str:
    """``<name>.cu`` of a folder of sources, with its headers and macros expanded."""
    command = [
        str(GXX),
        "-E",
        "-P",
        "-x",
        "c++",
        "-std=c++17",
        f"-I{folder}",
        *(f"-D{macro}" for macro in macros),
        str(folder / build.source_path(name).relative_to(build.KERNEL_SOURCES_FOLDER)),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run_compiler(out: Path, *arguments: str | Path) -> None:
    """Compile into ``out``, unless an earlier run has compiled the same."""
    command = [str(GXX), *FLAGS, "-o", str(out), *map(str, arguments)]
    read = (repr(FLAGS), *arguments, *sorted(HERE.glob("*.h")))
    compile_once(out, read, lambda: subprocess.run(command, check=True))
