"""Prebuilt kernels of a wheel: selected by processor features, identified by source hash."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from modelmill.core import env
from modelmill.core.errors import UsageError
from modelmill.ops.cpu.common import build, prebuilt

V2 = "fpu sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
V3 = f"{V2} avx avx2 f16c fma movbe bmi1 bmi2 abm xsave"
V4 = f"{V3} avx512f avx512dq avx512cd avx512bw avx512vl"
BF16 = f"{V4} avx512_vnni avx512_bf16"


def cpuinfo(
    flags: str, vendor: str = "GenuineIntel", family: int = 6, others: str | None = None
) -> str:
    """As Linux shows two processors; others: the flags of the second one."""
    texts = [flags, flags if others is None else others]
    return "".join(
        f"processor\t: {n}\nvendor_id\t: {vendor}\ncpu family\t: {family}\nflags\t\t: {text}\n\n"
        for n, text in enumerate(texts)
    )


@pytest.mark.parametrize(
    ("text", "best"),
    [
        (cpuinfo("fpu sse sse2 pni"), None),
        (cpuinfo(V2), "x86-64-v2"),
        (cpuinfo(V3), "x86-64-v3"),
        (cpuinfo(V3.replace(" fma", "")), "x86-64-v2"),
        (cpuinfo(V3, "AuthenticAMD", 23), "x86-64-v3"),
        (cpuinfo(V4), "x86-64-v4"),
        (cpuinfo(f"{V4} avx512_vnni"), "x86-64-v4-vnni"),
        (cpuinfo(BF16), "x86-64-v4-vnni"),  # Intel's multiply floats faster
        (cpuinfo(BF16, "AuthenticAMD", 25), "x86-64-v4-zen4"),
        (cpuinfo(BF16, "AuthenticAMD", 26), "x86-64-v4-zen5"),
        # cores of two kinds: what both have
        (cpuinfo(BF16, "AuthenticAMD", 25, others=V3), "x86-64-v3"),
        ("", None),
        ("processor\t: 0\n\n", None),
    ],
)
def test_the_best_level_that_every_core_can_run(text: str, best: str | None) -> None:
    levels = prebuilt.supported_levels(text, "x86_64")
    assert next((level.name for level in levels), None) == best
    flags = set(text.replace(":", " ").split())
    assert all(level.required_features <= flags for level in levels)
    assert prebuilt.supported_levels(text, "riscv64") == []


def test_arm_has_one_level() -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd evtstrm aes\nCPU implementer\t: 0x41\n\n"
    assert [level.name for level in prebuilt.supported_levels(text, "aarch64")] == ["armv8-a"]
    assert prebuilt.supported_levels(text.replace("asimd", ""), "aarch64") == []


def test_required_features_cover_the_compiler_flags() -> None:
    names = {"-mavx512vnni": "avx512_vnni", "-mavx512bf16": "avx512_bf16"}
    for level in prebuilt.CPU_LEVELS:
        extra = [
            flag for flag in level.flags if flag.startswith("-m") and not flag.startswith("-march")
        ]
        assert {names[flag] for flag in extra} <= level.required_features, level.name
        march = next(flag for flag in level.flags if flag.startswith("-march=")).removeprefix(
            "-march="
        )
        assert level.name.startswith(march)
        assert "native" not in march


def _copy(folder: Path) -> Path:
    folder.mkdir()
    for path in prebuilt.native_sources():
        copy = folder / path.relative_to(prebuilt.KERNEL_SOURCES_FOLDER)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    return folder


def test_other_sources_are_another_file(tmp_path: Path) -> None:
    level, folder = prebuilt.CPU_LEVELS[0], _copy(tmp_path / "sources")
    assert prebuilt.library_file_name(level, folder) == prebuilt.library_file_name(level)
    assert len({prebuilt.library_file_name(each) for each in prebuilt.CPU_LEVELS}) == len(
        prebuilt.CPU_LEVELS
    )
    header = folder / "common" / "simd.h"
    header.write_text(header.read_text() + "// another word\n")
    assert prebuilt.library_file_name(level, folder) != prebuilt.library_file_name(level)


def test_a_file_of_other_sources_is_never_found(tmp_path: Path) -> None:
    level = prebuilt.cpu_levels("x86_64")[-1]
    expected, stale = prebuilt.library_file_name(level), f"{level.name}-{'0' * 24}.so"
    (tmp_path / stale).touch()
    assert list(prebuilt.installed_supported_levels(cpuinfo(BF16), "x86_64", tmp_path)) == []
    (tmp_path / expected).touch()
    assert [
        path.name
        for _, path in prebuilt.installed_supported_levels(cpuinfo(BF16), "x86_64", tmp_path)
    ] == [expected]
    assert list(prebuilt.installed_supported_levels(cpuinfo("sse"), "x86_64", tmp_path)) == []
    assert (
        list(prebuilt.installed_supported_levels(cpuinfo(BF16), "x86_64", tmp_path / "none")) == []
    )


def test_glibc_is_read_from_the_symbols() -> None:
    assert prebuilt.required_glibc_version(b"\0GLIBC_2.2.5\0GLIBC_2.27\0GLIBC_2.4\0") == (2, 27)
    assert prebuilt.required_glibc_version(b"\x7fELF") is None


# -- which kernels are used


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that stands for the kernels of this installation."""
    path = tmp_path / "brought.so"
    path.write_bytes(b"no shared object")
    monkeypatch.setattr(
        prebuilt, "installed_supported_levels", lambda: iter([(prebuilt.CPU_LEVELS[-1], path)])
    )
    return path


def _choose(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    monkeypatch.setattr(env, "requested_cpu_kernels", lambda: choice)


def _library(path: Path) -> build.KernelLibrary:
    return build.KernelLibrary(path, None, None, 4)  # type: ignore[arg-type]


def test_what_was_brought_along_needs_no_compiler(
    brought: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _choose(monkeypatch, "auto")
    monkeypatch.setattr(build, "load_and_verify_library", _library)
    monkeypatch.setattr(
        build, "compile_library_if_missing", lambda flags: pytest.fail("nothing is compiled")
    )
    library = build.load_or_compile_library.__wrapped__()
    assert isinstance(library, build.KernelLibrary)
    assert (library.path, library.origin) == (brought, "prebuilt for armv8-a")
    assert not build.needs_compile()


def test_a_damaged_file_gives_way_to_a_compiler_and_is_named(
    brought: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _choose(monkeypatch, "auto")
    monkeypatch.setattr(env, "cxx_from_env", lambda: "no-such-compiler")
    reason = build.load_or_compile_library.__wrapped__()
    assert isinstance(reason, str)
    assert str(brought) in reason
    assert "'no-such-compiler'" in reason
    assert "\n" not in reason
    made, real = tmp_path / "made.so", build.load_and_verify_library
    monkeypatch.setattr(build, "compile_library_if_missing", lambda flags: made)
    monkeypatch.setattr(
        build,
        "load_and_verify_library",
        lambda path: _library(path) if path == made else real(path),
    )
    library = build.load_or_compile_library.__wrapped__()
    assert isinstance(library, build.KernelLibrary)
    assert (library.path, library.origin) == (made, build.COMPILED_HERE_ORIGIN)


def test_the_choice_is_the_users(
    brought: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "load_and_verify_library", _library)
    monkeypatch.setattr(build, "compile_library_if_missing", lambda flags: tmp_path / "made.so")
    for choice, path in (
        ("auto", brought),
        ("prebuilt", brought),
        ("native", tmp_path / "made.so"),
    ):
        _choose(monkeypatch, choice)
        library = build.load_or_compile_library.__wrapped__()
        assert isinstance(library, build.KernelLibrary)
        assert library.path == path
    _choose(monkeypatch, "none")
    assert "MODELMILL_CPU_KERNELS=none" in build.load_or_compile_library.__wrapped__()
    assert not build.needs_compile()
    monkeypatch.setattr(prebuilt, "installed_supported_levels", lambda: iter(()))
    _choose(monkeypatch, "prebuilt")
    assert "this installation has none" in build.load_or_compile_library.__wrapped__()
    _choose(monkeypatch, "fastest")
    with pytest.raises(UsageError, match="must be one of auto, prebuilt, native, none"):
        build.load_or_compile_library.__wrapped__()
