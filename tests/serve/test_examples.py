"""Each example is run as a user would run it, against a served engine."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from modelmill.core.types import SamplingParams
from modelmill.llm import LLM
from tests.serve.server_process import ServerProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# the engine reads 512 tokens, and nearly every letter is one: tools in few words
BRIEF = (
    "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}<tool_call>{% endif %}\n{% endfor %}"  # noqa: E501
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
)


@pytest.fixture
def url(server: ServerProcess) -> str:
    return server.url + "/v1"


def generate(llm: LLM, text: str, tokens: int) -> str:
    messages = [{"role": "user", "content": text}]
    return (
        llm.chat(messages, SamplingParams(temperature=0, max_tokens=tokens), progress=False)[0]
        .outputs[0]
        .text
    )


def run(name: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sync(url: str, llm: LLM) -> None:
    printed = run("openai_sync.py", url)
    assert printed.startswith(generate(llm, "Name three fruits.", 40) + "\n[")
    assert printed.endswith(" tokens]\n")


def test_async(url: str, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    lines = []
    for country in ("France", "Italy", "Spain", "Japan"):
        text = (
            llm.generate(f"The capital of {country} is", params, progress=False)[0].outputs[0].text
        )
        lines.append(f"{country}:{text.rstrip()}")
    assert run("openai_async.py", url).splitlines() == lines


def test_stream(url: str, llm: LLM) -> None:
    assert run("openai_sync.py", url, "--stream").startswith(
        generate(llm, "What is a watermill? One sentence.", 60) + "\n["
    )


def test_functions(stories: Path) -> None:
    with ServerProcess(stories, template=BRIEF) as serving:
        printed = run("openai_functions.py", serving.url + "/v1")
    call = re.match(r"weather\((\{.*?\})\)\n", printed)
    assert call, printed
    assert list(json.loads(call[1])) == ["city"]
    assert len(printed) > call.end()


def test_plain_sse(url: str, llm: LLM) -> None:
    assert run("plain_sse.py", url) == generate(llm, "Say hello.", 30) + "\n"


def test_none_is_forgotten() -> None:
    tested = {
        "openai_sync.py",
        "openai_async.py",
        "openai_functions.py",
        "plain_sse.py",
    }
    assert tested <= {path.name for path in EXAMPLES.glob("*.py")}


def test_plain_sse_without_a_server_is_one_line() -> None:
    with socket.socket() as bound:  # no server listens on it, and no program takes it
        bound.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        done = subprocess.run(
            [sys.executable, EXAMPLES / "plain_sse.py", address], capture_output=True, text=True
        )
    assert done.returncode == 1
    assert re.fullmatch(
        rf"no server answers at {address}: .*: modelmill serve ENGINE\n", done.stderr
    )
