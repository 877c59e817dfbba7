"""Names of served engines: several of one, aliases of several."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelmill.cli.serve import Args, _aliases, _model_names
from modelmill.core.errors import UsageError

ONE, TWO = Path("a.engine"), Path("b.engine")


def test_the_first_name_of_a_single_engine_is_its_name() -> None:
    args = Args(engines=(ONE,), served_model_name=("x", "y", "z"), alias=("w=x",))
    names = _model_names(args)
    assert names == ["x"]
    assert _aliases(args, names) == {"y": "x", "z": "x", "w": "x"}


def test_aliases_of_several_engines() -> None:
    args = Args(engines=(ONE, TWO), alias=("gpt-4o=b",))
    assert _aliases(args, _model_names(args)) == {"gpt-4o": "b"}


@pytest.mark.parametrize("alias", ["x", "=a", "x=nobody", "a=b", "b=b"])
def test_aliases_that_are_none(alias: str) -> None:
    args = Args(engines=(ONE, TWO), alias=(alias,))
    with pytest.raises(UsageError, match="--alias"):
        _aliases(args, _model_names(args))


def test_an_alias_is_given_once() -> None:
    args = Args(engines=(ONE,), alias=("x=a", "x=a"))
    with pytest.raises(UsageError, match="is taken"):
        _aliases(args, _model_names(args))
