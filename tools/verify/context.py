"""Shared by the items: the real model, its engines, the data, cached answers of transformers."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from modelmill.core.progress_callback import Progress

ROOT = Path(__file__).resolve().parents[2]


class VerifyContext:
    """Folders and a clock. ``digest``: of the package's sources, to name what depends on them."""

    def __init__(self, out: Path, shared: Path, digest: str) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.shared, self.digest = out, shared, digest
        self._began = time.perf_counter()

    def log(self, text: str) -> None:
        """A line on stderr with the time since the start."""
        print(f"[{time.perf_counter() - self._began:7.1f} s] {text}", file=sys.stderr, flush=True)

    def progress(self, what: str, every: float = 20.0) -> Progress:
        """A progress callback that logs at most every so many seconds."""
        last = [time.perf_counter()]

        def report(stage: str, done: int, total: int) -> None:
            if time.perf_counter() - last[0] > every:
                last[0] = time.perf_counter()
                self.log(f"  {what}: {stage} {done}/{total}")

        return report

    # -- the real model
    # ---------------------------------------------------------------------------

    @cached_property
    def gguf(self) -> Path:
        """SmolLM2-135M-Instruct, Q4_1."""
        from modelmill.checkpoint.pull import pull

        return pull("smollm2", self.out / "models")

    def engine(self, dtype: str, recipe: str = "none", checkpoint: Path | None = None) -> Path:
        """The accepted engine of a checkpoint (default: SmolLM2), built once for these sources."""
        from modelmill.artifact.store import is_engine_folder
        from modelmill.core.config import BuildConfig
        from modelmill.llm import build_engine

        source = checkpoint or self.gguf
        name = f"{source.stem}-{dtype}-{recipe}.engine"
        engine = self.out / "engines" / self.digest[:12] / name
        if not is_engine_folder(engine):
            self.log(f"  building {name}")
            config = BuildConfig(dtype=dtype, quantization=recipe, target="cpu")
            build_engine(source, engine, config, on_progress=self.progress(name))
        return engine

    def llm(
        self, dtype: str, recipe: str = "none", checkpoint: Path | None = None, **options: Any
    ) -> Any:
        """That engine, opened on the CPU."""
        from modelmill.llm import LLM

        settings: dict[str, Any] = {
            "device": "cpu",
            "max_model_len": 2048,
            "kv_cache_bytes": 1 << 30,
        } | options
        return LLM(self.engine(dtype, recipe, checkpoint), **settings)

    def reference(self, dtype: str = "float32") -> Any:
        """SmolLM2 in transformers, filled from the checkpoint's tensors."""
        from modelmill.checkpoint.open import open_checkpoint
        from modelmill.eval.hf_reference import load_reference

        return load_reference(open_checkpoint(self.gguf), dtype)

    # -- data
    # ---------------------------------------------------------------------------

    def questions(self, count: int) -> list[str]:
        """First turns of MT-bench."""
        lines = (self.shared / "data/text/mt_bench_questions.jsonl").read_text().splitlines()
        return [json.loads(line)["turns"][0] for line in lines[:count]]

    def cached_json(self, name: str, key: Any, make: Callable[[], Any]) -> Any:
        """Return a JSON value cached by ``key`` alone, independent of our sources."""
        import torch
        import transformers

        facts = json.dumps([key, transformers.__version__, torch.__version__], sort_keys=True)
        path = self.out / "kept" / f"{name}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"
        if path.exists():
            return json.loads(path.read_text())
        value = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(value))
        draft.replace(path)
        return value
