"""Compiles the CUDA C++ kernels of this backend once for this machine.

NVRTC, the compiler as a library, comes with torch's CUDA packages, so no toolkit is needed; where
it is absent, nvcc serves. The sources include nothing but this backend's headers, by their path
from the backend's folder. A compiled
kernel's name in the cache is a digest of all that decides its code: source, headers, macros,
architecture and the compiler's version.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from modelmill.core import env
from modelmill.core.errors import MissingDependency

GPU_ARCHITECTURE = "sm_90a"  # "a": with the instructions that Hopper alone has (wgmma, setmaxnreg)
NVRTC_FLAGS = ("--std=c++17",)
KERNEL_SOURCES_FOLDER = Path(__file__).resolve().parents[1]
NVCC_PATHS = ("nvcc", "/usr/local/cuda/bin/nvcc")


@dataclass(frozen=True)
class Compiler:
    """NVRTC (``library``) or nvcc (``path``), and the version that goes into the key."""

    version: str
    library: ctypes.CDLL | None = None
    path: str | None = None


class _KernelBuildFailed(Exception):
    """Why there is no kernel; its text is one line."""


def unavailable_reason(device_type: str) -> str | None:
    """None if kernels can be compiled and run on this device type, else the reason."""
    if device_type != "cuda":
        return "CUDA kernels need a GPU"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip is not None:  # an MI250 is of capability 9.0, too
        return "the CUDA kernels are written for NVIDIA GPUs, not for AMD's (ROCm)"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the CUDA kernels are written for compute capability 9.0 (H100, H200)"
    compiler = find_compiler()
    return compiler if isinstance(compiler, str) else None


def source_path(name: str) -> Path:
    """Path of ``<name>.cu``, in whichever sub-folder it is: names are unique."""
    return next(KERNEL_SOURCES_FOLDER.rglob(f"{name}.cu"))


def include_flag() -> str:
    """The compiler flag that finds headers by their path from the backend's folder."""
    return f"-I{KERNEL_SOURCES_FOLDER}"


def kernel_compile_failure_reason(
    device_type: str, name: str, macros: tuple[str, ...]
) -> str | None:
    """None if ``<name>.cu`` compiles for this device type (cached), else the reason in one line."""
    reason = unavailable_reason(device_type)
    if reason is None:
        try:
            compile_cubin(name, macros)
        except MissingDependency as problem:
            reason = str(problem)
    return reason


def compile_cubin(name: str, macros: tuple[str, ...] = ()) -> Path:
    """Path of the cubin of ``<name>.cu`` with ``macros``, compiled unless it is cached.

    macros: "DIM=64", …

    Raises MissingDependency where there is no compiler, or where it fails.
    """
    compiler = find_compiler()
    if isinstance(compiler, str):
        raise MissingDependency(f"the CUDA kernels cannot be compiled: {compiler}")
    target = env.cache_dir() / "cuda" / f"{name}-{_cubin_key(name, macros, compiler.version)}.cubin"
    if not target.exists():
        try:
            _store_cubin(_compile(compiler, name, macros), target)
        except _KernelBuildFailed as problem:
            raise MissingDependency(
                f"the CUDA kernel {name} cannot be compiled: {problem}"
            ) from None
    return target


@functools.cache
def find_compiler() -> Compiler | str:
    """The compiler to be used; a string says why there is none."""
    return (
        find_nvrtc()
        or find_nvcc()
        or "there is neither NVRTC (it comes with torch for CUDA) nor nvcc"
    )


def find_nvrtc() -> Compiler | None:
    """NVRTC as torch's packages hold it, or as the system's loader finds it."""
    beside_torch = sorted(
        Path(torch.__file__).parent.parent.glob("nvidia/*/lib/libnvrtc.so.*"), reverse=True
    )
    for name in (*map(str, beside_torch), "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            # It asks the loader for its builtins by their bare name, which finds them only where
            # they are loaded.
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*") if "/" in name else ():
                ctypes.CDLL(str(builtins))
            library = ctypes.CDLL(name)
            major, minor = ctypes.c_int(), ctypes.c_int()
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0:
                return Compiler(
                    f"nvrtc {major.value}.{minor.value} {Path(name).name}", library=library
                )
        except (OSError, AttributeError):
            continue
    return None


def find_nvcc() -> Compiler | None:
    """Nvcc as the PATH or the toolkit's usual folder holds it."""
    for name in NVCC_PATHS:
        path = shutil.which(name)
        if path is not None:
            shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            if shown.returncode == 0:
                return Compiler(shown.stdout, path=path)
    return None


def _cubin_key(name: str, macros: tuple[str, ...], version: str) -> str:
    digest = hashlib.sha256()
    for part in (GPU_ARCHITECTURE, *NVRTC_FLAGS, *macros, version):
        digest.update(part.encode() + b"\0")
    for path in (source_path(name), *sorted(KERNEL_SOURCES_FOLDER.rglob("*.cuh"))):
        relative = path.relative_to(KERNEL_SOURCES_FOLDER).as_posix()
        digest.update(relative.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _compile(compiler: Compiler, name: str, macros: tuple[str, ...]) -> bytes:
    flags = (*NVRTC_FLAGS, include_flag(), *(f"-D{macro}" for macro in macros))
    if compiler.library is not None:
        return _compile_with_nvrtc(
            compiler.library, name, (f"--gpu-architecture={GPU_ARCHITECTURE}", *flags)
        )
    assert compiler.path is not None
    number = GPU_ARCHITECTURE.removeprefix("sm_")
    return _compile_with_nvcc(
        compiler.path, name, (f"-gencode=arch=compute_{number},code=sm_{number}", *flags)
    )


def _compile_with_nvrtc(library: ctypes.CDLL, name: str, flags: tuple[str, ...]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = source_path(name).read_bytes()

    def call(function: str, *args: object) -> None:
        failed = getattr(library, function)(*args)
        if failed:
            raise _KernelBuildFailed(f"{function}: {library.nvrtcGetErrorString(failed).decode()}")

    call("nvrtcCreateProgram", ctypes.byref(program), source, f"{name}.cu".encode(), 0, None, None)
    try:
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        if library.nvrtcCompileProgram(program, len(flags), options):
            call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            call("nvrtcGetProgramLog", program, log)
            raise _KernelBuildFailed(
                f"NVRTC fails: {_first_compiler_error(log.value.decode(errors='replace'))}"
            )
        call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, cubin)
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _compile_with_nvcc(path: str, name: str, flags: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="modelmill-") as folder:
        made = Path(folder) / "kernel.cubin"
        command = [path, "-cubin", *flags, "-o", str(made), str(source_path(name))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except subprocess.TimeoutExpired:
            raise _KernelBuildFailed("nvcc did not finish within 300 s") from None
        if done.returncode:
            raise _KernelBuildFailed(f"nvcc fails: {_first_compiler_error(done.stderr)}")
        return made.read_bytes()


def _first_compiler_error(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()] or ["it does not say why"]
    return next((line for line in lines if "error" in line), lines[0]).strip()


def _store_cubin(cubin: bytes, target: Path) -> None:
    """Write to a temporary file and move it in place, so that processes may race."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix="building-", delete=False
        ) as file:
            file.write(cubin)
        Path(file.name).replace(target)
    except OSError as problem:
        raise _KernelBuildFailed(f"{target.parent} cannot be written: {problem.strerror}") from None
