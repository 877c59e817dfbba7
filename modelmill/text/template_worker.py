"""Renders chat templates in a process of template_process.py's; imports nothing of modelmill.

A template is an untrusted program. It runs in Jinja's sandbox with limits of memory and CPU time,
so that a template can only end this process, never the engine. Requests and replies are one line
of JSON each, on stdin and stdout.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any, BinaryIO


class OutputTooLong(Exception):
    """The template wrote more characters than allowed."""


def make_jinja_sandbox() -> Any:
    """Make a sandbox with transformers' filters, globals and whitespace rules for templates."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """Render the body of {% generation %}, which only marks the model's text for training."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: object) -> None:
        raise jinja2.TemplateError(f"refused: {message}")

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes HTML; models were not trained on that
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    # a function, not the class, whose attributes lead out of the sandbox
    environment.globals["dict"] = lambda *args, **named: dict(*args, **named)
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def render_template(environment: Any, compiled: dict[str, Any], request: dict[str, Any]) -> str:
    """Render a request; raises the exceptions of the template, or OutputTooLong."""
    source = request["template"]
    if source not in compiled:
        compiled.clear()
        compiled[source] = environment.from_string(source)
    chunks: list[str] = []
    size = 0
    for chunk in compiled[source].generate(**request["variables"]):
        size += len(chunk)
        if size > request["max_chars"]:
            raise OutputTooLong
        chunks.append(chunk)
    return "".join(chunks)


def handle_render_request(
    environment: Any, compiled: dict[str, Any], line: bytes
) -> dict[str, Any]:
    """Return {"text"} or {"failed": reason, "detail"}; template_process.py handles the reasons."""
    try:
        request = json.loads(line)
        # counts CPU seconds of this process, also in C code; SIGPROF kills it by default
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        return {"text": render_template(environment, compiled, request)}
    except OutputTooLong:
        return {"failed": "output"}
    except MemoryError:
        return {"failed": "memory"}
    except RecursionError:
        return {"failed": "error", "detail": "it recurses too deeply"}
    except Exception as error:
        detail = " ".join(str(error).split())[:300]
        if detail.startswith("refused: ") and type(error).__name__ == "TemplateError":
            return {"failed": "refused", "detail": detail.removeprefix("refused: ")}
        return {"failed": "error", "detail": f"{type(error).__name__}: {detail}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def serve_stdin_requests(stdin: BinaryIO, stdout: BinaryIO, max_memory: int) -> None:
    """Handle requests until stdin ends, which it also does if the engine's process dies."""
    environment = make_jinja_sandbox()
    compiled: dict[str, Any] = {}
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    # if a template breaks out of the sandbox, it cannot write files or start processes
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))
    reply: dict[str, Any] = {"ready": True}
    while True:
        stdout.write(json.dumps(reply).encode("ascii") + b"\n")
        stdout.flush()
        del reply
        line = stdin.readline()
        if not line:
            return
        reply = handle_render_request(environment, compiled, line)
        del line


if __name__ == "__main__":
    sys.path.append(sys.argv[2])  # where the parent found jinja2; -I does not read PYTHONPATH
    serve_stdin_requests(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1]))
