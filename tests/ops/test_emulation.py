"""The emulation of the kernels' hardware: what it makes of PTX, and its numbers against torch's."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from modelmill.ops.cuda.common.build import KERNEL_SOURCES_FOLDER
from tests.ops.emulation.emulator import Emulator, preprocessed, requires_emulation, run_compiler
from tests.ops.emulation.translate import cluster_sizes, translate

KNOWN = {"ex2", "setp", "mbarrier", "mma", "mov", "cp"}


def _normalize_spaces(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("asm", "calls"),
    [
        (
            'asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));',
            'ptx::ex2("approx.f32", (y), static_cast<float>(x));',
        ),
        (
            'asm("setp.ne.b32 add, %0, 0;" ::"r"(add));',
            'ptx::setp("ne.b32", own_add, static_cast<u32>(add), 0);',
        ),
        (
            'asm volatile("{ .reg .pred done; again: mbarrier.try_wait.x done, [%0], %1; @!done '
            'bra again; }" '
            '::"r"(at(a, b)), "r"(p) : "memory");',
            "__label__ again; bool own_done = 0; "
            'again: ptx::mbarrier("try_wait.x", own_done, static_cast<u32>(at(a, b)), '
            "static_cast<u32>(p)); "
            "if (!own_done) goto again;",
        ),
        (
            'asm("mma.x {%0, %1}, {%2, %3}, {%0, %1};" : "+f"(d[0]), "+f"(d[1]) : "r"(a ? b : c), '
            '"r"(e));',
            'ptx::mma("x", std::array{&(d[0]), &(d[1])}, std::array{static_cast<u32>(a ? b : c), '
            "static_cast<u32>(e)}, "
            "std::array{(d[0]), (d[1])});",
        ),
        (
            'asm("cp.box [%0], [%1, {%2, %3}];" ::"r"(to), "l"(&map), "r"(x), "r"(y));',
            'ptx::cp("box", static_cast<u32>(to), emu::bits(&map), '
            "std::array{static_cast<u32>(x), static_cast<u32>(y)});",
        ),
        ('asm("mov.u32 %0, %%rank;" : "=r"(r));', 'ptx::mov("u32", (r), ptx::rank());'),
        ('asm volatile("" : "+r"(kept));', ""),
        ('asm("sqrt.x %0;" : "+f"(y));', 'emu::fail("sqrt.x is not emulated");'),
    ],
    ids=lambda text: re.split(r"[.;]", text.split('"')[1])[0] if text.startswith("asm") else "",
)
def test_ptx_becomes_calls(asm: str, calls: str) -> None:
    assert _normalize_spaces(translate(asm, KNOWN)) == _normalize_spaces(f"{{ {calls} }}")


def test_variables_in_shared_memory() -> None:
    text = (
        "extern __shared__ __align__(1024) unsigned char all[];\n__shared__ __align__(16) "
        "Parts<4> one;"
    )
    actual = translate(text + "__shared__ u16 two[N + 8];", KNOWN)
    assert "#define all (emu::dynamic())" in actual
    assert "typedef Parts<4> one_type; one_type &one = emu::in_block<one_type, 0>();" in actual
    assert "typedef u16 two_type[N + 8]; two_type &two = emu::in_block<two_type, 1>();" in actual


@requires_emulation
@pytest.mark.parametrize("name", sorted(path.stem for path in KERNEL_SOURCES_FOLDER.rglob("*.cu")))
def test_every_kernel_is_translated(name: str) -> None:
    text = preprocessed(name, ())
    actual = translate(text, KNOWN)
    assert "asm" in text
    assert not re.search(r"\basm\b|__shared__", actual)
    assert cluster_sizes(text)


NUMBERS = """
#include "machine.h"
extern "C" unsigned number(int which, float wide) {
    return which == 0 ? emu::to_brief(wide) : which == 1 ? emu::to_half(wide) : emu::to_e4m3(wide);
}
extern "C" float wide(int which, unsigned bits) {
    return which == 0 ? emu::brief(static_cast<std::uint16_t>(bits)) : emu::half(static_cast<std::uint16_t>(bits));
}
"""  # noqa: E501


@requires_emulation
def test_numbers_are_torchs(emulator: Emulator, tmp_path: Path) -> None:
    (tmp_path / "numbers.cpp").write_text(NUMBERS)
    path = tmp_path / "numbers.so"
    run_compiler(path, "-shared", tmp_path / "numbers.cpp", *emulator.machine())
    library = ctypes.CDLL(str(path))
    library.number.argtypes, library.wide.restype = (ctypes.c_int, ctypes.c_float), ctypes.c_float
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3000, generator=generator) * torch.exp2(
        torch.randint(-26, 18, (3000,), generator=generator)
    )
    halves = torch.arange(0, 512) / 1024  # of e4m3: subnormal numbers, and what lies between two
    ends = torch.tensor(
        [0.0, -0.0, 448.0, 464.0, 1e9, -1e9, float("inf"), 65504.0, 65519.0, 65520.0, 3.4e38]
    )
    for which, dtype in enumerate((torch.bfloat16, torch.float16, torch.float8_e4m3fn)):
        values = torch.cat([drawn, halves, ends])
        clamped = values.clamp(-448, 448) if dtype is torch.float8_e4m3fn else values
        expected = (
            clamped.to(dtype).view(torch.uint8 if dtype.itemsize == 1 else torch.int16).int()
            & 0xFFFF
        )
        assert [library.number(which, value) for value in values.tolist()] == expected.tolist()
        assert library.number(which, float("nan")) & 0x7F == 0x7F or dtype is torch.float16
        if dtype.itemsize == 2:
            bits = expected[~clamped.to(dtype).isnan()].tolist()
            assert [library.wide(which, each) for each in bits] == clamped.to(
                dtype
            ).float().tolist()
