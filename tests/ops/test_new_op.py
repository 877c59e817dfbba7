"""An op is one file, and a faster kernel of it one file: nothing else is edited for either."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from modelmill.core.errors import UsageError
from modelmill.ops import registry
from tests.ops.test_implementations import test_implementation_matches_the_reference as check

REFERENCE = """
import torch

from modelmill.ops.case import Case, randn
from modelmill.ops.declaration import OpDeclaration

DECLARATION = OpDeclaration({declared})
TOLERANCE = {{torch.float32: 1e-6, torch.float16: 1e-2, torch.bfloat16: 1e-1}}


def {name}(x):
    return x * 2 {more}


def cases(device, dtype):
    for rows in (3, 7):
        yield Case(f"{{rows}} rows", {{"x": randn(rows, 4, device=device, dtype=dtype, seed=rows)}})
"""
IMPLEMENTATION = """
calls = []


def unavailable_reason(device_type):
    return None if device_type == "cpu" else "needs a CPU"


def supports(x):
    return len(x) <= 5


def run(x):
    calls.append(len(x))
    return x + x {more}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with toy ops, read as if its files were in ``modelmill/ops``."""
    before = set(sys.modules)
    for package in ("modelmill.ops", "modelmill.ops.cpu.norm_quantize"):
        own = tmp_path.joinpath(*package.split("."))
        own.mkdir(parents=True, exist_ok=True)
        module = importlib.import_module(package)
        monkeypatch.setattr(module, "__path__", [*module.__path__, str(own)])
    ops = tmp_path / "modelmill" / "ops"
    (ops / "toy.py").write_text(REFERENCE.format(declared="", name="toy", more=""))
    (ops / "toy_add.py").write_text(
        REFERENCE.format(declared='fuses=("toy",), optional=True', name="toy_add", more="+ 1")
    )
    (ops / "cpu" / "norm_quantize" / "toy.py").write_text(IMPLEMENTATION.format(more=""))
    (ops / "cpu" / "norm_quantize" / "toy_add.py").write_text(IMPLEMENTATION.format(more="+ 1"))
    yield ops
    for name in set(sys.modules) - before:
        if ".toy" in name:
            parent, _, child = name.rpartition(".")
            vars(sys.modules[parent]).pop(child, None)
            del sys.modules[name]


def test_a_file_is_an_op_and_a_file_a_faster_kernel(folder: Path) -> None:
    names = registry.op_names()
    assert {"toy", "toy_add"} <= set(names)
    assert names.index("toy") < names.index("decode") < names.index("toy_add")
    ops = registry.select_backends("cpu")
    assert ops.backends["toy"] == ops.backends["toy_add"] == "cpu"
    kernel = registry.implementations("toy")["cpu"]
    few, many = torch.ones(5, 4), torch.ones(6, 4)
    assert torch.equal(ops.toy(few), few * 2)
    assert torch.equal(ops.toy(many), many * 2)
    assert kernel.calls == [5], "more rows than it supports are the reference's"
    assert torch.equal(ops.toy_add(few), few * 2 + 1)
    assert ops.toy_add(many) is None


def test_a_new_op_can_be_switched(folder: Path) -> None:
    ops = registry.select_backends("cpu", {"toy": "torch"})
    assert ops.toy is registry.reference("toy")
    assert ops.backends["toy"] == ops.backends["toy_add"] == "torch"
    assert ops.toy_add is None, "the op that it replaces was switched"
    with pytest.raises(UsageError, match="did you mean toy"):
        registry.select_backends("cpu", {"toyy": "cpu"})
    with pytest.raises(UsageError, match="no such implementation"):
        registry.select_backends("cpu", {"toy": "triton"})


@pytest.mark.parametrize("op", ["toy", "toy_add"])
def test_its_cases_are_checked_against_the_reference(
    folder: Path, op: str, pytestconfig: pytest.Config
) -> None:
    check(op, "cpu", "cpu", torch.float32, pytestconfig)
    kernel = registry.implementations(op)["cpu"]
    assert set(kernel.calls) == {3}, "the case of 7 rows is not supported"
    kernel.run = lambda x: x
    with pytest.raises(AssertionError):
        check(op, "cpu", "cpu", torch.float32, pytestconfig)


def test_ops_are_bound_once() -> None:
    ops = registry.select_backends("cpu")
    with pytest.raises(AttributeError, match="bound once"):
        ops.linear = None
    with pytest.raises(AttributeError, match="no op 'liner'"):
        ops.liner(1)
    with pytest.raises(AttributeError, match="no op 'liner'"):
        ops.replace({"liner": None})
    other = ops.replace({"decode": None})
    assert other.decode is None
    assert other.linear is ops.linear
    assert other.backends is ops.backends
