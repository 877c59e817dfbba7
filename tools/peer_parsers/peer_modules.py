"""Modules that stand for a peer's own while its tests run.

Only what a test of calls and content needs is there: records, adapters, a tokenizer, and the
constants of the peer's modules, which are read from its source as literals. Anything else is an
``Internal``: a test that uses it checks no calls, and counts apart.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.peer_parsers import plain_tokenizer, records, sglang_adapter, vllm_adapter
from tools.peer_parsers.peer_parser import PeerInternalError

FOREIGN = (
    "jsonschema",
    "mistral_common",
    "openai_harmony",
    "orjson",
    "partial_json_parser",
    "pytest_asyncio",
    "transformers",
    "xgrammar",
)
"""Libraries that tests import beside the peer."""


class Internal:
    """Something of a peer that is not there; every use of it is refused."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __getattr__(self, name: str) -> Internal:
        """Return a part of it."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(self)(f"{self.__dict__['name']}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refuse."""
        raise PeerInternalError(self.__dict__["name"])

    __iter__ = __len__ = __getitem__ = __enter__ = __contains__ = __add__ = __radd__ = __or__ = (
        __call__
    )

    def __mro_entries__(self, bases: Sequence[Any]) -> tuple[type, ...]:
        """Let a test derive a class from it, and refuse to make one."""
        return (InternalBase,)


class InternalBase:
    """Base of classes that a test derives from a peer's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise PeerInternalError(type(self).__name__)


class Foreign(Internal):
    """Something of another library: it may be made when a file of tests is read."""

    def __call__(self, *_: Any, **__: Any) -> Foreign:
        """Return a value that no test can use."""
        return Foreign(f"{self.__dict__['name']}()")

    __or__ = __call__


THINKING = (
    "srt.parser.",
    "srt.function_call.kimik3_format",
    "srt.entrypoints.openai.encoding_dsv4",
)
"""The peer's own modules that its tests run: it splits thinking off before it parses calls."""


class PeerModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules of one peer when they are imported.

    Args:
        source: folder of the peer's package.
        root: name of the package.
        own: begins of names of modules that the peer itself has to do.
    """

    def __init__(self, source: Path, root: str, own: tuple[str, ...] = THINKING) -> None:
        self._source, self._root = source, root
        self._own = tuple(f"{root}.{name}" for name in own)
        self._named: dict[str, Any] = {
            name: value for name, value in vars(records).items() if isinstance(value, type)
        }
        self._named |= {
            "Function": records.FunctionDefinition,
            "ToolParser": vllm_adapter.ToolParser,
        }
        self._named |= {
            "ResponsesRequest": records.ChatCompletionRequest,
            "Tool": records.ChatCompletionToolsParam,
            "AutoTokenizer": plain_tokenizer.PlainTokenizer,
            "MistralTokenizer": plain_tokenizer.EncoderTokenizer,
            "ensure_json": lambda text, *_: text,
            "TokenizerLike": plain_tokenizer.PlainTokenizer,
            "get_tokenizer": plain_tokenizer.PlainTokenizer.from_pretrained,
            "detokenize_incrementally": plain_tokenizer.detokenize_incrementally,
            "ToolParserManager": vllm_adapter.ToolParserManager,
            "JsonArrayParser": sglang_adapter.detector_class("JsonArrayParser"),
            "FunctionCallParser": sglang_adapter.FunctionCallParser,
            "register_cpu_ci": lambda *_, **__: None,
        }
        if root == "sglang":
            import unittest

            self._named["CustomTestCase"] = unittest.TestCase

    def install(self) -> None:
        """Take the place of the peer, and of libraries that are not installed."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """Find a module of the peer."""
        if name.partition(".")[0] not in (self._root, *FOREIGN):
            return None
        path = self._path(name)
        if name.startswith(self._own) and path.exists():
            return importlib.util.spec_from_file_location(name, path)
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module when its names are asked for."""
        module.__getattr__ = self._lookup(module.__name__)  # type: ignore[method-assign]

    def _lookup(self, module: str) -> Callable[[str], Any]:
        def lookup(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self._value(module, name)

        return lookup

    def _value(self, module: str, name: str) -> Any:
        if "reasoning" in module or name.startswith("Rust"):
            return Internal(f"{module}.{name}")
        if name in self._named:
            return self._named[name]
        if name.endswith("ToolParser"):
            return vllm_adapter.parser_class(name)
        if name.endswith("Detector"):
            return sglang_adapter.detector_class(name)
        if module.partition(".")[0] in FOREIGN:
            return Foreign(f"{module}.{name}")
        constants = self._constants(module)
        return constants[name] if name in constants else Internal(f"{module}.{name}")

    def _path(self, module: str) -> Path:
        return self._source.joinpath(*module.split(".")[1:]).with_suffix(".py")

    def _constants(self, module: str) -> dict[str, Any]:
        """Constants of a module of the peer that are literals."""
        path = self._path(module)
        values = dict[str, Any]()
        if module.partition(".")[0] != self._root or not path.exists():
            return values
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                try:
                    values[node.targets[0].id] = ast.literal_eval(node.value)
                except ValueError:
                    continue
        return values
