"""An absent extra skips a test with the reason; every other failure stays one."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelmill.core.errors import MissingDependency
from tests import optional_extras

ASKED = "--x needs it; install it with: pip install -e '.[some]'"
IMPORT = "from modelmill.core.errors import MissingDependency"


@pytest.fixture(autouse=True)
def _an_extra_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(optional_extras.EXTRAS, "some", ("no_such_extra",))
    monkeypatch.setitem(optional_extras.EXTRA_OF, "no_such_extra", "some")


def test_what_is_an_absent_extra() -> None:
    absent = ModuleNotFoundError("No module named 'no_such_extra.part'", name="no_such_extra.part")
    assert (
        optional_extras.missing_extra_reason(absent)
        == "needs no_such_extra: pip install -e '.[some]'"
    )
    assert optional_extras.missing_extra_reason(MissingDependency(ASKED)) == ASKED
    optional_extras.skip_if_extra_missing("modelmill: all is well\n")
    with pytest.raises(pytest.skip.Exception, match="--x needs it"):
        optional_extras.skip_if_extra_missing(f"a line\nmodelmill: {ASKED}\n")


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'modelmill.nothing'", name="modelmill.nothing"),
        ModuleNotFoundError("No module named 'pytest.nothing'", name="pytest.nothing"),
        ImportError("cannot import name 'x' from 'no_such_extra'", name="no_such_extra"),
        MissingDependency("--device cuda: this torch sees no such GPU"),
        AssertionError("pip install -e '.[some]'"),
    ],
)
def test_what_is_a_failure(error: Exception) -> None:
    assert optional_extras.missing_extra_reason(error) is None
    with pytest.raises(type(error)):
        optional_extras.skip_or_raise(error)


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("import no_such_extra", pytest.skip.Exception),
        ("import no_such_module", pytest.Collector.CollectError),
        (
            "from modelmill.core.errors import MissingDependency\nraise "
            f"MissingDependency({ASKED!r})",
            pytest.skip.Exception,
        ),
    ],
)
def test_a_module_is_skipped_or_fails(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    outcome: type[Exception],
) -> None:
    path = tmp_path / "test_made.py"
    path.write_text(source)
    monkeypatch.setattr(optional_extras, "ROOT", tmp_path)
    with pytest.raises(outcome):
        _ = optional_extras.SkippingModule.from_parent(request.session, path=path).obj
