"""What SGLang's own detectors stream, beside modelmill's parsers, for the answers of its tests.

``python -m tools.peer_parsers.own_streams PACKAGE`` reads answers as JSON, and writes for each
whether the calls are the same: the names, and the arguments as JSON. They run in a process of
their own, since the tests have adapters in the place of these detectors.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.peer_parsers import peer_names
from tools.peer_parsers.asked_answers import AskedAnswer
from tools.peer_parsers.loose_text import LooseJson
from tools.peer_parsers.peer_modules import PeerModules
from tools.peer_parsers.peer_parser import PeerParser
from tools.peer_parsers.records import ChatCompletionToolsParam

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "srt.function_call"
OWN = (f"{FOLDER}.", "srt.parser.")
TIMEOUT_SECONDS = 300

Calls = list[tuple[str, LooseJson]]


def find_streamed(package: Path, tests: Mapping[str, Sequence[AskedAnswer]]) -> list[str]:
    """Return the tests for all of whose answers SGLang streams modelmill's calls.

    Args:
        package: folder of SGLang's package.
        tests: test → its answers.
    """
    answers = [each for test_answers in tests.values() for each in test_answers]
    if not answers:
        return []
    done = subprocess.run(
        [sys.executable, "-m", "tools.peer_parsers.own_streams", str(package.resolve())],
        cwd=ROOT,
        input=json.dumps([vars(each) for each in answers]),
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=True,
    )
    same = iter(json.loads(done.stdout))
    by_test = {
        test: list(itertools.islice(same, len(test_answers)))
        for test, test_answers in tests.items()
    }
    return [test for test, each in by_test.items() if all(each)]


def _is_same(package: Path, answer: AskedAnswer) -> bool:
    # a whole answer comes letter by letter: it must not matter how it is cut
    pieces = answer.pieces if answer.streamed else list("".join(answer.pieces))
    peer = _peer_calls(package, answer, pieces)
    return any(peer == calls for calls in _own_calls(answer, pieces))


def _own_calls(answer: AskedAnswer, pieces: Sequence[str]) -> Iterable[Calls]:
    """Return modelmill's calls while the answer goes on, and when it ends."""
    name = peer_names.SGLANG[answer.peer_class]
    for ends in (False, True):
        parser = PeerParser(name, answer.tools, any_name=False)
        deltas = [each for piece in pieces for each in parser.push(piece)]
        deltas += parser.finish() if ends else []
        yield _join(
            (each.index, each.name, each.arguments) for each in deltas if not isinstance(each, str)
        )


def _peer_calls(package: Path, answer: AskedAnswer, pieces: Sequence[str]) -> Calls:
    """Return the calls that SGLang's detector streams."""
    tools = [
        ChatCompletionToolsParam(function={"name": name, "parameters": parameters})
        for name, parameters in answer.tools.items()
    ]
    detector = _detector(package, answer.peer_class)
    results = [detector.parse_streaming_increment(piece, tools) for piece in pieces]
    if hasattr(detector, "finish"):
        results.append(detector.finish(tools))
    return _join(
        (call.tool_index, call.name, call.parameters) for each in results for call in each.calls
    )


def _detector(package: Path, name: str) -> Any:
    for path in sorted(package.joinpath(*FOLDER.split(".")).glob("*.py")):
        if f"class {name}(" in path.read_text("utf-8"):
            module = importlib.import_module(f"{package.name}.{FOLDER}.{path.stem}")
            return getattr(module, name)()
    raise LookupError(name)


def _join(deltas: Iterable[tuple[int, str | None, str]]) -> Calls:
    names, arguments = dict[int, str](), dict[int, str]()
    for index, name, text in deltas:
        names[index] = names.get(index, "") + (name or "")
        arguments[index] = arguments.get(index, "") + text
    return [(names[index], LooseJson(arguments[index])) for index in names]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the answers of standard input."""
    package = Path((argv or sys.argv[1:])[0])
    logging.disable()
    PeerModules(package, package.name, OWN).install()
    answers = [AskedAnswer(**each) for each in json.load(sys.stdin)]
    print(json.dumps([_is_same(package, each) for each in answers]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
