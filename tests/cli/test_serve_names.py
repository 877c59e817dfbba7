"""Names of served engines: several of one, aliases of several."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelmill.cli.serve import Args, _always_loaded_model_names, _parse_aliases
from modelmill.cli.serve_catalogue import add_catalogue_aliases, with_detected_models_dir
from modelmill.core.errors import UsageError
from modelmill.serve.catalogue.entries import CatalogueEntry

ONE, TWO = Path("a.engine"), Path("b.engine")


def test_the_first_name_of_a_single_engine_is_its_name() -> None:
    args = Args(engines=(ONE,), served_model_name=("x", "y", "z"), alias=("w=x",))
    names = _always_loaded_model_names(args)
    assert names == ["x"]
    assert _parse_aliases(args, names) == ({"y": "x", "z": "x", "w": "x"}, {})


def test_a_folder_of_engines_is_a_catalogue(tmp_path: Path) -> None:
    for name in ("a.engine", "b.engine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    one = tmp_path / "a.engine"
    args = with_detected_models_dir(Args(engines=(one, tmp_path)))
    assert (args.engines, args.models_dir) == ((one,), tmp_path)
    assert with_detected_models_dir(Args(engines=(one,))).models_dir is None
    with pytest.raises(UsageError, match="one folder of engines"):
        with_detected_models_dir(Args(engines=(tmp_path,), models_dir=tmp_path))


def test_aliases_of_several_engines() -> None:
    args = Args(engines=(ONE, TWO), alias=("gpt-4o=b",))
    assert _parse_aliases(args, _always_loaded_model_names(args)) == ({"gpt-4o": "b"}, {})


@pytest.mark.parametrize("alias", ["x", "=a", "x=nobody", "a=b", "b=b"])
def test_aliases_that_are_none(alias: str) -> None:
    args = Args(engines=(ONE, TWO), alias=(alias,))
    with pytest.raises(UsageError, match="--alias"):
        _parse_aliases(args, _always_loaded_model_names(args))


def test_aliases_of_a_catalogue() -> None:
    args = Args(engines=(ONE,), models_dir=Path("m"), alias=("x=a", "y=c", "z=c"))
    on_demand = _parse_aliases(args, _always_loaded_model_names(args))[1]
    assert on_demand == {"y": "c", "z": "c"}
    entries = [CatalogueEntry("b", TWO), CatalogueEntry("c", Path("c.engine"), aliases=("d",))]
    assert [each.aliases for each in add_catalogue_aliases(entries, on_demand)] == [
        (),
        ("d", "y", "z"),
    ]
    for wrong, message in (({"x": "e"}, "no engine is served as e; there are b, c"),
                           ({"d": "b"}, "is used already")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            add_catalogue_aliases(entries, wrong)


def test_an_alias_is_given_once() -> None:
    args = Args(engines=(ONE,), alias=("x=a", "x=a"))
    with pytest.raises(UsageError, match="is taken"):
        _parse_aliases(args, _always_loaded_model_names(args))
