"""Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before Triton
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


def _mend_interpreter() -> None:
    """Four faults of Triton 3.6's interpreter that compiled kernels do not have.

    Loop bounds are read with int(array of one element), which NumPy 2.4 refuses; a dot of bfloat16
    multiplies the bit patterns; an integer becomes a bfloat16 bit pattern unconverted; a float32
    that rounds up to a power of two becomes half of it in fp8, and is cut where it should round in
    bfloat16.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    builder = interpreter.InterpreterBuilder
    patch, dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl
    convert = builder.create_fp_to_fp
    narrow = {
        tl.bfloat16: (torch.bfloat16, torch.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    }

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        values = interpreter._convert_float(handle.data, tl.bfloat16, tl.float32, None).view(
            "float32"
        )
        return interpreter.TensorHandle(values, tl.float32)

    def mended_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def rounded(source: Any, kind: Any) -> Any:
        number, bits = narrow[kind.scalar]
        values = torch.from_numpy(np.ascontiguousarray(source.data)).to(number)
        return interpreter.TensorHandle(
            values.view(bits).numpy().reshape(source.data.shape), kind.scalar
        )

    def mended_convert(self: Any, source: Any, kind: Any, mode: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar in narrow:
            return rounded(source, kind)
        return convert(self, source, kind, mode)

    def mended_cast(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            return rounded(source, kind)
        if kind.scalar == tl.bfloat16 and source.dtype.scalar.is_int():
            source = interpreter.TensorHandle(source.data.astype("float32"), tl.float32)
        return cast(self, source, kind)

    interpreter._patch_lang_tensor = mended
    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = (
        mended_dot,
        mended_cast,
        mended_convert,
    )
    _demand_boolean_masks(builder)
    _patch_once(interpreter)


def _demand_boolean_masks(builder: Any) -> None:
    """Every launch in every test fails where a mask is no boolean: Triton 3.9 refuses it, 3.6 takes
    it in silence.
    """
    masked = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}

    def strict(name: str, at: int) -> Any:
        original = getattr(builder, name)

        def checked(self: Any, *arguments: Any, **named: Any) -> Any:
            mask = arguments[at]
            assert mask.data.dtype == np.bool_, (
                f"{name}: the mask is {mask.data.dtype}, it must be boolean"
            )
            return original(self, *arguments, **named)

        return checked

    for name, at in masked.items():
        setattr(builder, name, strict(name, at))


def _patch_once(interpreter: Any) -> None:
    """Triton's language is patched once a launch, not again at every call of a function in it:
    twice as fast.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    languages = (interpreter.tl, interpreter.tl.core)
    patched: set[frozenset[int]] = set()

    def patch_new(fn: Any) -> Any:
        spoken = frozenset(
            id(value)
            for value in fn.__globals__.values()
            if any(value is each for each in languages)
        )
        if spoken not in patched:
            patched.add(spoken)
            return patch(fn)
        return None  # what the patch of a call returns is not used

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            patched.clear()  # the launch takes its patches back

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_anew


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _mend_interpreter()


@pytest.fixture(scope="session")
def emulator_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where emulated kernels are compiled, once for all tests."""
    return tmp_path_factory.mktemp("emulation")


@pytest.fixture
def emulator(emulator_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """What the launches of ops/cuda go to instead of a GPU; memory that nobody writes holds no
    numbers.
    """
    emulator = Emulator(emulator_folder)
    replace_gpu(emulator, monkeypatch)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield emulator
    torch.use_deterministic_algorithms(before)
