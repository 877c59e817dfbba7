"""Shared fixtures: the folder with real data, found beside the checkout, and quiet, seeded torch."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def shared_dir() -> Path | None:
    """The folder of specs, real weights and real data beside the checkout; None where it is absent."""
    path = ROOT.parent / "shared"
    return path if (path / "data").is_dir() else None


@pytest.fixture(scope="session")
def shared() -> Path:
    """Path of the shared data folder, or a skip that says why."""
    path = shared_dir()
    if path is None:
        pytest.skip("needs the shared data folder beside the checkout")
    return path


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)
