"""The trained LLaMA of 260 thousand parameters, as an engine, and prompts for it."""

from __future__ import annotations

from pathlib import Path

from modelmill.core.config import BuildConfig
from modelmill.llm import build_engine

STORY_STARTS = (
    "Once upon a time",
    "The dog",
    "Lily said",
    "A",
    "Ben and Tom",
    "One day",
    "The sun",
    "Mom",
)


def build_stories(shared: Path, folder: Path, *, check: bool = True) -> Path:
    """Build its engine in float32 for the CPU; check: run the acceptance contract."""
    engine = folder / "stories.engine"
    config = BuildConfig(dtype="float32", target="cpu")
    build_engine(shared / "data/models/stories260K", engine, config, check=check)
    return engine
