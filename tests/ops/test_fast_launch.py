"""Launching compiled Triton kernels directly: what makes another kernel, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from modelmill.ops.triton.common import fast_launch
from modelmill.ops.triton.common.fast_launch import CachedLauncher


class Kernel:
    """Stands for a triton.jit function: a launch returns a compiled kernel."""

    def __init__(self, compiled: bool = True) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.compiled = compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.log.append(("compiled", grid, args[-1], options))
            return Compiled(self.log) if self.compiled else None

        return launch


class Compiled:
    function = 0x1234

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.log.append(("cached", grid, args[-1]))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def call(
    launch: CachedLauncher,
    x: torch.Tensor,
    *,
    rows: int = 3,
    width: int = 8,
    const: Any = True,
    warps: int = 4,
) -> None:
    launch((rows, 1, 1), (x, x), (rows, width), (width,), (const,), {"num_warps": warps})


def test_a_kernel_is_compiled_once_per_specialization() -> None:
    kernel = Kernel()
    launch, x = CachedLauncher(kernel), torch.zeros(64)
    call(launch, x)
    call(launch, x)
    call(launch, x + 1, rows=7)  # another tensor, and a number that is not specialized
    assert [each[0] for each in kernel.log] == ["compiled", "cached", "cached"]
    assert kernel.log[2][1] == (7, 1, 1)
    assert kernel.log[0][3] == {"num_warps": 4}


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(64, dtype=torch.float16)},
        {"x": torch.zeros(65)[1:]},  # address not a multiple of 16
        {"width": 9},
        {"const": False},
        {"warps": 8},
    ],
    ids=["dtype", "address", "number", "constant", "option"],
)
def test_what_decides_the_code_makes_another_kernel(other: dict[str, Any]) -> None:
    kernel = Kernel()
    launch = CachedLauncher(kernel)
    call(launch, torch.zeros(64))
    call(launch, **({"x": torch.zeros(64)} | other))
    call(launch, torch.zeros(64))
    assert [each[0] for each in kernel.log] == ["compiled", "compiled", "cached"]


def test_a_kernel_that_is_not_compiled_yet_is_tried_again() -> None:
    kernel = Kernel(compiled=False)
    launch = CachedLauncher(kernel)
    for _ in range(2):
        call(launch, torch.zeros(64))
    assert [each[0] for each in kernel.log] == ["compiled", "compiled"]


class Param:
    def __init__(self, name: str, free: bool = False) -> None:
        self.name, self.do_not_specialize = name, free


def test_the_carveout_is_set_once_when_a_kernel_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carveouts: list[tuple[int, int]] = []
    monkeypatch.setattr(
        fast_launch,
        "set_smem_carveout",
        lambda function, percent: carveouts.append((function, percent)),
    )
    launch, x = CachedLauncher(Kernel()), torch.zeros(64)
    for _ in range(2):
        call(launch, x)
        launch((3, 1, 1), (x, x), (3, 8), (8,), (False,), {"num_warps": 4}, 7)
    assert carveouts == [(Compiled.function, 7)]
    launch((3, 1, 1), (x, x), (3, 16), (16,), (False,), {"num_warps": 4}, 7)
    assert len(carveouts) == 2


def test_a_specialized_number_must_be_in_fixed() -> None:
    kernel = Kernel()
    kernel.params = [Param("x"), Param("y"), Param("rows", free=True), Param("width"), Param("eps")]  # type: ignore[attr-defined]
    launch, x = CachedLauncher(kernel), torch.zeros(64)
    launch((1, 1, 1), (x, x), (3, 8, 1e-5), (8,), (), {})
    with pytest.raises(AssertionError, match="width = 9"):
        launch((1, 1, 1), (x, x), (3, 9, 1e-5), (7,), (), {})
