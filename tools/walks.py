"""Counts the files of the package that a reader opens to follow a prompt and a weight.

    python tools/walks.py CHECKPOINT [--quantization int4] [--method nearest] [--json]

A file counts if one of its functions runs in the walk (``sys.setprofile``), however short. What
runs while a module is imported does not count, nor do other packages, other threads and native
sources. Everything runs once before, so that imports and caches are done.

* prompt: ``modelmill run ENGINE --prompt …`` on a CPU, from the command line to the printed text,
  without the opening of the engine;
* step: what of it runs under the engine core's ``step``, from schedule to sampled token;
* weight: from the checkpoint's tensor to the GEMM: the build of a quantized engine without
  acceptance and autotuning, the load of its model, and what runs under ``Linear`` and the weight
  formats in that request;
* tensor: what of it has a function that takes, makes or returns a tensor.

It also runs with an older version of the package that comes first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

PROMPT = "Once upon a time there was a little girl who liked to play with her red ball. " * 6
# under these, a request's calls belong to the walk of a weight
WEIGHT_FILES = ("nn/linear.py", "weights/")
# the module of the engine core, and its name in older versions
STEP_FILES = ("runtime/engine_core.py", "runtime/loop.py")


class FileRecorder:
    """Collects the files of the package whose functions are called while it records.

    Attributes:
        files: Files with at least one call.
        functions: (file, qualified name of the function), in the order of their first calls.
        step_files: Those among them whose call came from the engine core's ``step``.
        weight_files: Those whose call came from a linear layer or a weight format.
        tensor_files: Those in which a function takes, makes or returns a tensor.
    """

    def __init__(self, package: Path) -> None:
        self.package = str(package) + "/"
        self.files: set[str] = set()
        self.functions: dict[tuple[str, str], None] = {}
        self.step_files: set[str] = set()
        self.weight_files: set[str] = set()
        self.tensor_files: set[str] = set()
        self._paused = 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of this thread within the block."""
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def pause_within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose calls are not recorded."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._paused += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._paused -= 1

        return wrapper

    def _on_event(self, frame: FrameType, event: str, arg: object) -> None:
        path = frame.f_code.co_filename
        if self._paused or not path.startswith(self.package):
            return
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # the body of a module or a class
            return
        name = path.removeprefix(self.package)
        if event == "return" and name not in self.tensor_files:
            if _has_tensor((arg, *frame.f_locals.values())):
                self.tensor_files.add(name)
        elif event == "call":
            self.files.add(name)
            self.functions.setdefault((name, frame.f_code.co_qualname))
            if name not in self.step_files and self._is_under(frame, STEP_FILES, "step"):
                self.step_files.add(name)
            if name not in self.weight_files and self._is_under(frame, WEIGHT_FILES):
                self.weight_files.add(name)

    def _is_under(
        self, frame: FrameType | None, files: tuple[str, ...], function: str | None = None
    ) -> bool:
        """Whether a function of these files, of this name if it is not None, is on the stack."""
        while frame is not None:
            name = frame.f_code.co_filename.removeprefix(self.package)
            if name.startswith(files) and function in (None, frame.f_code.co_name):
                return True
            frame = frame.f_back
        return False


def _has_tensor(values: Iterable[object]) -> bool:
    """Whether one of the values is a tensor or a weight, or a sequence or mapping with one."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    for value in values:
        if isinstance(value, torch.Tensor) or isinstance(
            getattr(value, "weight", None), torch.Tensor
        ):
            return True
        if isinstance(value, dict):
            value = tuple(value.values())
        if isinstance(value, list | tuple) and any(
            isinstance(each, torch.Tensor) for each in value[:8]
        ):
            return True
    return False


def run_prompt(engine: Path, llm: type, recorder: FileRecorder | None) -> None:
    """``modelmill run`` in this process; ``recorder``: None runs it without recording."""
    main = importlib.import_module("modelmill.cli.main")
    argv = ["run", str(engine), "--prompt", PROMPT, "--max-tokens", "8", "--device", "cpu"]
    argv += ["--raw", "--temperature", "0"]
    usual = llm.__init__  # type: ignore[misc]
    try:
        if recorder is not None:
            llm.__init__ = recorder.pause_within(usual)  # type: ignore[misc]
        recording = recorder.recording() if recorder is not None else contextlib.nullcontext()
        with contextlib.redirect_stdout(io.StringIO()), recording:
            code = main.run_command_line(argv)
    finally:
        llm.__init__ = usual  # type: ignore[misc]
    if code:
        raise SystemExit(f"modelmill {' '.join(argv)} ended with {code}")


def load(engine: Path) -> None:
    """Load the engine's model."""
    for name in (
        "modelmill.loader.model_loader",
        "modelmill.runtime.model_loader",
        "modelmill.runtime.load",
    ):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(name)
            break
    else:
        raise SystemExit("this version's loader has another name; add it here")
    store = importlib.import_module("modelmill.artifact.store")
    open_artifact = getattr(store, "open_artifact", None) or store.open_engine
    load_model = getattr(module, "load_model", None) or module.load
    load_model(open_artifact(engine), "cpu")


def walks(checkpoint: Path, quantization: str, method: str) -> dict[str, list[str]]:
    """The files of both walks."""
    modelmill = importlib.import_module("modelmill")
    llm = importlib.import_module("modelmill.llm")
    package = Path(str(modelmill.__file__)).resolve().parent
    config = modelmill.core.config.BuildConfig(
        quantization=quantization, method=method, dtype="float32"
    )
    prompt, weight = FileRecorder(package), FileRecorder(package)
    with tempfile.TemporaryDirectory() as folder:
        first, engine = Path(folder) / "first.engine", Path(folder) / "second.engine"
        llm.build_engine(checkpoint, first, config, check=False, tune=False)
        with weight.recording():
            llm.build_engine(checkpoint, engine, config, check=False, tune=False)
        load(engine)
        with weight.recording():
            load(engine)
        run_prompt(engine, llm.LLM, None)
        run_prompt(engine, llm.LLM, prompt)
    return {
        "prompt": sorted(prompt.files),
        "step": sorted(prompt.step_files),
        "weight": sorted(weight.files | prompt.weight_files),
        "tensor": sorted(weight.tensor_files | prompt.weight_files & prompt.tensor_files),
    }


def main() -> None:
    """Print both walks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="a small checkpoint")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--method", default="auto", help="rounding method of int4")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    files_by_walk = walks(args.checkpoint, args.quantization, args.method)
    if args.json:
        print(json.dumps(files_by_walk))
        return
    for name, files in files_by_walk.items():
        print(f"{name}: {len(files)} files")
        print("".join(f"  {file}\n" for file in files))


if __name__ == "__main__":
    main()
