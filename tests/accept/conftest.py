"""Seeded checkpoints that the acceptance tests read, each saved once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accept.build_and_accept import save_tiny


class TinyCheckpoints(dict[str, Path]):
    """Folders by the name of a family; a checkpoint is saved when it is first read."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, name: str) -> Path:
        self[name] = save_tiny(name, self._root / name)
        return self[name]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    """The checkpoints of ``save_tiny``."""
    return TinyCheckpoints(tmp_path_factory.mktemp("tiny"))
