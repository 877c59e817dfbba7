"""The planted faults can be planted: each text occurs once, and its tests exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutation_check import FAULTS, ROOT, Fault, failing_test


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_one_place(fault: Fault) -> None:
    assert (ROOT / fault.path).read_text().count(fault.before) == 1
    assert fault.before != fault.after
    assert all((ROOT / each).exists() for each in fault.tests)


def test_every_area_has_a_fault() -> None:
    areas = {fault.path.split("/")[1] for fault in FAULTS}
    assert areas >= {
        *("accept", "builder", "checkpoint", "nn", "ops", "quant"),
        *("runtime", "serve", "text", "vision"),
    }


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one file of code, and the option that the tests are called with."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # half of pytest's start
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--quick', action='store_true')\n"
    )
    (tmp_path / "code.py").write_text("ONE = 1\n")
    return tmp_path


def test_a_fault_is_planted_seen_and_removed(checkout: Path) -> None:
    (checkout / "test_code.py").write_text(
        "from pathlib import Path\n"
        "def test_one():\n"
        "    assert Path('code.py').read_text() == 'ONE = 1\\n'\n"
    )
    fault = Fault("two", "code.py", "= 1", "= 2", ("test_code.py",))
    assert failing_test(checkout, fault, None) == "test_code.py::test_one"
    harmless = Fault("none", "code.py", "= 1", "= 1", ("test_code.py",))
    assert failing_test(checkout, harmless, None) is None
    assert (checkout / "code.py").read_text() == "ONE = 1\n"


def test_a_test_that_fails_without_the_fault_is_no_proof(checkout: Path) -> None:
    (checkout / "test_code.py").write_text("def test_one():\n    assert False\n")
    fault = Fault("two", "code.py", "= 1", "= 2", ("test_code.py",))
    with pytest.raises(RuntimeError, match="fails without the fault too"):
        failing_test(checkout, fault, None)
