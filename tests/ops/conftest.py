"""Fixtures of the op tests.

Without a GPU the Triton kernels run in Triton's interpreter, which must be selected before Triton
is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.emulation.emulator import Emulator, replace_gpu
from tests.ops.interpreter_speed import speed_up


def _fix_interpreter() -> None:
    """Fix four bugs of Triton 3.6's interpreter that compiled kernels do not have.

    Loop bounds are read with int(array of one element), which NumPy 2.4 rejects; a dot of bfloat16
    multiplies the bit patterns; an integer is stored as a bfloat16 bit pattern without conversion;
    a float32 that rounds up to a power of two becomes half of it in fp8, and is truncated instead
    of rounded in bfloat16.
    """
    try:
        import triton
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    builder = interpreter.InterpreterBuilder
    patch, dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl
    convert = builder.create_fp_to_fp
    narrow_dtypes = {
        tl.bfloat16: (torch.bfloat16, torch.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    }

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def to_float32(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        values = interpreter._convert_float(handle.data, tl.bfloat16, tl.float32, None).view(
            "float32"
        )
        return interpreter.TensorHandle(values, tl.float32)

    def dot_float32(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, to_float32(a), to_float32(b), *rest)

    def round_to(source: Any, dtype: Any) -> Any:
        torch_dtype, bits = narrow_dtypes[dtype.scalar]
        values = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch_dtype)
        return interpreter.TensorHandle(
            values.view(bits).numpy().reshape(source.data.shape), dtype.scalar
        )

    def convert_rounded(self: Any, source: Any, dtype: Any, mode: Any) -> Any:
        if source.dtype.scalar == tl.float32 and dtype.scalar in narrow_dtypes:
            return round_to(source, dtype)
        return convert(self, source, dtype, mode)

    def cast_rounded(self: Any, source: Any, dtype: Any) -> Any:
        if source.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            return round_to(source, dtype)
        if dtype.scalar == tl.bfloat16 and source.dtype.scalar.is_int():
            source = interpreter.TensorHandle(source.data.astype("float32"), tl.float32)
        return cast(self, source, dtype)

    interpreter._patch_lang_tensor = patch_tensor
    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = (
        dot_float32,
        cast_rounded,
        convert_rounded,
    )
    _require_boolean_masks(builder)
    _patch_once(interpreter)
    speed_up(triton, interpreter)


def _require_boolean_masks(builder: Any) -> None:
    """Fail every launch whose mask is not boolean: Triton 3.9 rejects it, 3.6 does not."""
    masked = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}

    def strict(name: str, at: int) -> Any:
        original = getattr(builder, name)

        def checked(self: Any, *arguments: Any, **named: Any) -> Any:
            mask = arguments[at]
            assert mask.data.dtype == np.bool_, (
                f"{name}: the mask must be boolean, not {mask.data.dtype}"
            )
            return original(self, *arguments, **named)

        return checked

    for name, at in masked.items():
        setattr(builder, name, strict(name, at))


def _patch_once(interpreter: Any) -> None:
    """Patch Triton's language once per launch instead of at every call in it: twice as fast."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    languages = (interpreter.tl, interpreter.tl.core)
    patched: set[frozenset[int]] = set()
    languages_by_module: dict[str, frozenset[int]] = {}

    def languages_of(fn: Any) -> frozenset[int]:
        if fn.__module__ not in languages_by_module:
            values = {id(value) for value in fn.__globals__.values()}
            languages_by_module[fn.__module__] = frozenset(values.intersection(map(id, languages)))
        return languages_by_module[fn.__module__]

    def patch_new(fn: Any) -> Any:
        used_languages = languages_of(fn)
        if used_languages not in patched:
            patched.add(used_languages)
            return patch(fn)
        return None  # the return value is not used

    def launch_patched(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            patched.clear()  # the launch reverts its patches

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_patched


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _fix_interpreter()


@pytest.fixture(scope="session")
def emulator_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder where emulated kernels are compiled, once for all tests."""
    return tmp_path_factory.mktemp("emulation")


@pytest.fixture
def emulator(emulator_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """Runs launches of ops/cuda in place of a GPU; unwritten memory is NaN."""
    emulator = Emulator(emulator_folder)
    replace_gpu(emulator, monkeypatch)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield emulator
    torch.use_deterministic_algorithms(before)
