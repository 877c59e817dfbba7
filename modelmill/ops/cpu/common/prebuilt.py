"""CPU kernels that a wheel brings along, compiled beforehand for common levels of processors.

A level is a set of instructions that compilers know by name. At run time the best one that this
processor offers is taken (``supported_levels``), so that no compiler is needed and no instruction
is met that the processor lacks. A file's name holds a digest of the sources and flags that it was
made of: one of other sources is never loaded. Standard library only, since setup.py reads this file
before anything is installed.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

KERNEL_SOURCES_FOLDER = Path(__file__).resolve().parents[1]
PREBUILT_FOLDER = KERNEL_SOURCES_FOLDER / "prebuilt"
CPUINFO = Path("/proc/cpuinfo")
COMMON_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=default",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)
# Runs on systems older than the one that compiles: only old symbols of glibc (thread_pool.cpp),
# nothing of libstdc++.
_PORTABLE_BUILD_FLAGS = ("-DMILL_PORTABLE", "-fno-threadsafe-statics")
LINK_FLAGS = (
    "-shared",
    "-static-libstdc++",
    "-static-libgcc",
    "-s",
    "-Wl,-z,noexecstack",
    "-Wl,--as-needed",
)

# Instructions by the names of /proc/cpuinfo: https://gitlab.com/x86-psABIs/x86-64-ABI,
# "micro-architecture levels".
_X86_64_V2_FEATURES = frozenset(["cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"])
_X86_64_V3_FEATURES = _X86_64_V2_FEATURES | frozenset(
    ["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"]
)
_X86_64_V4_FEATURES = _X86_64_V3_FEATURES | frozenset(
    ["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]
)
_AVX512_VNNI_FEATURES = _X86_64_V4_FEATURES | {"avx512_vnni"}
_AVX512_BF16_FEATURES = _AVX512_VNNI_FEATURES | {"avx512_bf16"}
_VNNI_COMPILE_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
_BF16_COMPILE_FLAGS = (*_VNNI_COMPILE_FLAGS, "-mavx512bf16")


class CpuLevel(NamedTuple):
    """Instruction set level of a prebuilt library.

    required_features: instructions by /proc/cpuinfo's names. vendor, family: restricts the
    level to these processors; None: all.

    machine: as ``platform.machine`` says it. flags: compiler flags beside
    ``COMMON_FLAGS``.
    """

    name: str
    machine: str
    required_features: frozenset[str]
    flags: tuple[str, ...]
    vendor: str | None = None
    family: int | None = None


# Best first. MILL_PREFETCH_L2, MILL_ROW_BY_ROW, MILL_BF16_AS_FP32: build.native_compiler_flags.
CPU_LEVELS = (
    CpuLevel(
        "x86-64-v4-zen4",
        "x86_64",
        _AVX512_BF16_FEATURES,
        (*_BF16_COMPILE_FLAGS, "-DMILL_PREFETCH_L2"),
        "AuthenticAMD",
        25,
    ),
    CpuLevel(
        "x86-64-v4-zen5",  # and later ones
        "x86_64",
        _AVX512_BF16_FEATURES,
        (*_BF16_COMPILE_FLAGS, "-DMILL_ROW_BY_ROW"),
        "AuthenticAMD",
    ),
    CpuLevel("x86-64-v4-vnni", "x86_64", _AVX512_VNNI_FEATURES, _VNNI_COMPILE_FLAGS),
    CpuLevel("x86-64-v4", "x86_64", _X86_64_V4_FEATURES, ("-march=x86-64-v4",)),
    CpuLevel("x86-64-v3", "x86_64", _X86_64_V3_FEATURES, ("-march=x86-64-v3",)),
    CpuLevel("x86-64-v2", "x86_64", _X86_64_V2_FEATURES, ("-march=x86-64-v2",)),
    CpuLevel("armv8-a", "aarch64", frozenset({"fp", "asimd"}), ("-march=armv8-a",)),
)


def compile_flags(level: CpuLevel) -> tuple[str, ...]:
    """All compiler flags of a level."""
    return (*COMMON_FLAGS, *level.flags, *_PORTABLE_BUILD_FLAGS)


def cpu_levels(machine: str) -> list[CpuLevel]:
    """The levels of a kind of machine ("x86_64", "aarch64"), best first."""
    return [level for level in CPU_LEVELS if level.machine == machine]


def native_sources(
    folder: Path = KERNEL_SOURCES_FOLDER, suffixes: tuple[str, ...] = (".cpp", ".h")
) -> list[Path]:
    """Files that decide the machine code, or those of some suffixes."""
    return sorted(path for path in folder.rglob("*.*") if path.suffix in suffixes)


def include_flag(folder: Path = KERNEL_SOURCES_FOLDER) -> str:
    """The compiler flag that finds headers by their path from the backend's folder."""
    return f"-I{folder}"


def library_file_name(level: CpuLevel, folder: Path = KERNEL_SOURCES_FOLDER) -> str:
    """What a level's shared object of these sources is called."""
    digest = hashlib.sha256("\0".join((*compile_flags(level), *LINK_FLAGS)).encode())
    for path in native_sources(folder):
        name = path.relative_to(folder).as_posix()
        # line ends are no part of a source: a checkout may change them
        digest.update(b"\0" + name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n"))
    return f"{level.name}-{digest.hexdigest()[:24]}.so"


def compile_and_link_commands(
    compiler: str,
    level: CpuLevel,
    objects: Path,
    target: Path,
    folder: Path = KERNEL_SOURCES_FOLDER,
) -> tuple[list[list[str]], list[str]]:
    """Return (compile commands that may run in parallel, the link command) of a level."""
    files = native_sources(folder, (".cpp",))
    made = {source: str(objects / f"{level.name}-{source.stem}.o") for source in files}
    flags = (*compile_flags(level), include_flag(folder))
    compiling = [[compiler, *flags, "-c", str(source), "-o", made[source]] for source in files]
    return compiling, [compiler, *LINK_FLAGS, *made.values(), "-pthread", "-o", str(target)]


def required_glibc_version(library: bytes) -> tuple[int, int] | None:
    """The newest glibc version that a shared object requires; None if none (another libc)."""
    versions = [
        (int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)
    ]
    return max(versions, default=None)


def installed_supported_levels(
    cpuinfo: str | None = None, machine: str | None = None, folder: Path = PREBUILT_FOLDER
) -> Iterator[tuple[CpuLevel, Path]]:
    """Levels that this processor supports and that are installed for these sources, best first."""
    if not folder.is_dir():
        return
    for level in supported_levels(
        _read_text_or_empty(CPUINFO) if cpuinfo is None else cpuinfo, machine or platform.machine()
    ):
        path = folder / library_file_name(level)
        if path.is_file():
            yield level, path


def supported_levels(cpuinfo: str, machine: str) -> list[CpuLevel]:
    """The levels whose instructions every processor of /proc/cpuinfo has, best first.

    The system leaves out of that file what it does not save when threads change, so nothing listed
    there can trap.
    """
    blocks = [_cpuinfo_fields(block) for block in cpuinfo.split("\n\n")]
    blocks = [block for block in blocks if "flags" in block or "Features" in block]
    if not blocks:
        return []
    offered = [
        frozenset((block.get("flags") or block.get("Features", "")).split()) for block in blocks
    ]
    everywhere = frozenset.intersection(*offered)
    return [
        level
        for level in cpu_levels(machine)
        if level.required_features <= everywhere and _matches_vendor_and_family(level, blocks[0])
    ]


def _matches_vendor_and_family(level: CpuLevel, processor: dict[str, str]) -> bool:
    """Whether the level is for processors of this maker and family."""
    vendor = level.vendor in (None, processor.get("vendor_id"))
    return vendor and (level.family is None or processor.get("cpu family") == str(level.family))


def _cpuinfo_fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _read_text_or_empty(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
