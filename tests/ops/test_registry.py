"""The registry: implementations are picked once, switched by hand, and never bypassed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from modelmill.core.errors import UsageError
from modelmill.ops import registry
from modelmill.ops.declaration import OpDeclaration

SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh")
FUSED = {op: each.fuses for op, each in registry.op_declarations().items() if each.fuses}


def test_every_op_is_chosen_and_callable() -> None:
    ops = registry.select_backends("cpu")
    assert set(ops.backends) == set(registry.op_names())
    assert all(callable(getattr(ops, op)) for op in ops.backends if op not in FUSED)


def test_a_switched_kernel_is_the_reference() -> None:
    ops = registry.select_backends("cpu", {"rms_norm": "torch"})
    assert ops.rms_norm is registry.reference("rms_norm")
    assert ops.backends["rms_norm"] == "torch"


@pytest.mark.parametrize("op", FUSED)
def test_a_fused_op_is_off_where_one_of_its_ops_was_switched(op: str) -> None:
    ops = registry.select_backends("cpu", {FUSED[op][0]: "torch"})
    assert getattr(ops, op) is None
    assert ops.backends[op] == "torch"


@pytest.mark.parametrize("op", FUSED)
def test_a_fused_op_can_be_switched_off(op: str) -> None:
    ops = registry.select_backends("cpu", {op: "torch"})
    assert getattr(ops, op) is None
    assert ops.backends["linear"] == registry.select_backends("cpu").backends["linear"]


@pytest.mark.parametrize(
    "wrong",
    [{"rms_nrom": "torch"}, {"rms_norm": "cuda"}, {"linear": "abacus"}, {"decode": "cuda"}],
    ids=str,
)
def test_what_cannot_be_is_one_line(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError) as error:
        registry.select_backends("cpu", wrong)
    assert "\n" not in str(error.value)


def _implementation(name: str, least: int) -> SimpleNamespace:
    """An implementation that serves arguments ≥ ``least`` and says who ran."""
    return SimpleNamespace(
        unavailable_reason=lambda device_type: None,
        supports=lambda x: x >= least,
        run=lambda x: name,
    )


def _offer(monkeypatch: pytest.MonkeyPatch, **offered: SimpleNamespace) -> None:
    monkeypatch.setattr(registry, "op_declarations", lambda: {"toy": OpDeclaration()})
    monkeypatch.setattr(registry, "implementation", lambda op, name: offered.get(name))
    monkeypatch.setattr(registry, "reference", lambda op: lambda *args, **kwargs: "torch")


def _offer_fused_op_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """``toy`` from Triton, and ``fused_toy``, which replaces it, from CUDA C++."""
    modules = {("toy", "triton"): "plain", ("fused_toy", "cuda"): "fused"}
    offered = {key: _implementation(name, 1) for key, name in modules.items()}
    declared = {"toy": OpDeclaration(), "fused_toy": OpDeclaration(("toy",), optional=True)}
    monkeypatch.setattr(registry, "op_declarations", lambda: declared)
    monkeypatch.setattr(registry, "implementation", lambda op, name: offered.get((op, name)))
    monkeypatch.setattr(registry, "reference", lambda op: lambda *args, **kwargs: "torch")


def test_a_backend_may_have_a_fused_op_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _offer_fused_op_alone(monkeypatch)
    ops = registry.select_backends("cuda")
    assert ops.backends == {"toy": "triton", "fused_toy": "cuda"}
    assert ops.fused_toy(1) == "fused"
    assert ops.fused_toy(0) is None


@pytest.mark.parametrize("chosen", ["triton", "torch"])
def test_a_fused_op_alone_does_not_bypass_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    _offer_fused_op_alone(monkeypatch)
    ops = registry.select_backends("cuda", {"toy": chosen})
    assert ops.backends == {"toy": chosen, "fused_toy": "torch"}
    assert ops.fused_toy is None


@pytest.mark.parametrize(("x", "who"), [(9, "cuda"), (5, "triton"), (1, "torch")])
def test_what_a_variant_does_not_serve_goes_to_the_next(
    monkeypatch: pytest.MonkeyPatch, x: int, who: str
) -> None:
    _offer(monkeypatch, cuda=_implementation("cuda", 9), triton=_implementation("triton", 5))
    ops = registry.select_backends("cuda")
    assert ops.backends["toy"] == "cuda"
    assert vars(ops)["toy"](x) == who


@pytest.mark.parametrize(
    ("requested", "served"),
    [("cuda", ["cuda", "triton"]), ("triton", ["triton", "triton"]), ("torch", ["torch"] * 2)],
)
def test_behind_a_forced_variant_stand_those_less_preferred(
    monkeypatch: pytest.MonkeyPatch, requested: str, served: list[str]
) -> None:
    _offer(monkeypatch, cuda=_implementation("cuda", 9), triton=_implementation("triton", 5))
    ops = registry.select_backends("cuda", {"toy": requested})
    assert [vars(ops)["toy"](x) for x in (9, 5)] == served


def _by_name(backend: str) -> dict[str, list[str]]:
    """Sub-folders of a backend's Python files and native sources, by file name without suffix."""
    root = Path(registry.__file__).parent / backend
    folders_by_name: dict[str, list[str]] = {}
    for suffix in SOURCES:
        for path in root.rglob(f"*{suffix}"):
            if path.name != "__init__.py":
                folders_by_name.setdefault(path.name, []).append(
                    path.parent.relative_to(root).as_posix()
                )
    return folders_by_name


@pytest.mark.parametrize("backend", registry.BACKENDS_BESIDES_TORCH)
def test_a_file_name_is_unique_in_its_backend(backend: str) -> None:
    """The registry, includes and compiled objects find a file by its name alone."""
    folders_by_name = _by_name(backend)
    assert {name: folders for name, folders in folders_by_name.items() if len(folders) > 1} == {}
    families = {folder for folders in folders_by_name.values() for folder in folders}
    assert "." not in families, "a kernel is in the sub-folder of its family"
    assert families.isdisjoint(Path(name).stem for name in folders_by_name), (
        "no file is called as a folder"
    )


def test_an_op_has_one_family() -> None:
    """Its implementation is in the sub-folder of the same name in each backend."""
    names_by_backend = {backend: _by_name(backend) for backend in registry.BACKENDS_BESIDES_TORCH}
    families = {
        op: {folder for names in names_by_backend.values() for folder in names.get(f"{op}.py", ())}
        for op in registry.op_names()
    }
    assert {op: family for op, family in families.items() if len(family) > 1} == {}
    assert families["linear"] == {"gemm_16bit"}


def test_kernels_of_another_device_are_not_imported() -> None:
    """Triton takes a second, and no kernel of its is ever chosen on a CPU."""
    code = "import sys; from modelmill.ops.registry import select_backends as select; select('cpu')"
    code += "; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("error", "says"), [(ModuleNotFoundError("x", name="triton"), None), (ImportError("y"), "y")]
)
def test_an_absent_package_is_no_fault_but_a_broken_file_is(
    error: ImportError, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(package: str, name: str) -> None:
        raise error

    monkeypatch.setattr(registry, "import_module_from_subfolders", broken)
    if says is None:
        assert registry.implementations("linear") == {}
    else:
        with pytest.raises(ImportError, match=says):
            registry.implementations("linear")


def test_a_missing_file_of_ours_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(package: str, name: str) -> None:
        raise ModuleNotFoundError("gone", name="modelmill.ops.triton.gone")

    monkeypatch.setattr(registry, "import_module_from_subfolders", broken)
    with pytest.raises(ModuleNotFoundError, match="gone"):
        registry.implementations("linear")


@pytest.mark.parametrize("backend", registry.BACKENDS_BESIDES_TORCH)
def test_a_condition_on_memory_stands_beside_a_range(backend: str) -> None:
    """Without one, an implementation of an op with ranges would serve any sizes and dtypes."""
    for op, declaration in registry.op_declarations().items():
        module = registry.implementation(op, backend)
        if module is None or declaration.problem is None:
            continue
        has_range = hasattr(module, "SUPPORTED_PROBLEMS") or hasattr(module, "KERNELS")
        assert has_range or not hasattr(module, "supports"), op
