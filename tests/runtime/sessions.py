"""Answers and session files of engine cores, shared by the tests of sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.session_file import write_session
from modelmill.runtime.session_pages import (
    SessionPages,
    export_session,
    session_compatibility_layout,
)
from tests.runtime import tiny

MANY = 1 << 30


def answer(core: EngineCore, prompt: tuple[int, ...]) -> tuple[list[Any], int]:
    """(ids with their log-probabilities, cached tokens) of an answer."""
    params = tiny.params(max_tokens=9, logprobs=5, ignore_eos=True)
    core.add(tiny.requests([prompt], params, eos=())[0])
    events = [event for event in tiny.drain(core) if event.token_id is not None]
    return [(event.token_id, event.logprobs) for event in events], events[-1].cached_tokens


def save(core: EngineCore, prompt: tuple[int, ...], path: Path) -> SessionPages:
    """The session of a prompt, in a file."""
    session = export_session(core, prompt, "", MANY)
    write_session(path, session_compatibility_layout(core), session)
    return session
