"""Where a comparison takes place: models are made and built once, sides are started on them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.make_checkpoint import NORMAL
from benchmarks.model_shapes import with_num_layers
from benchmarks.peer_process import ROOT, PeerError, PeerProcess
from benchmarks.synthetic_shapes import VLLM_FORMATS, write_synthetic_config
from benchmarks.vllm_peer import ENVIRONMENT

SHARED_GPU_FRACTION, SINGLE_GPU_FRACTION = 0.45, 0.9
"""Share of the card's memory for a side that has a neighbour, and for one that has none."""
MAX_MODEL_LEN = 4608
MODELMILL = "modelmill"
PEERS = ("vLLM", "transformers")


@dataclass
class PeerSetup:
    """A folder for models and logs, and where the peer's packages are.

    peer: a folder of vLLM's packages; peer_python: an interpreter that has them. layers: fewer, for
    a dry run. variants: RunConfig fields by name of the modelmill side that uses them. weights: the
    distribution of random weights in ``make_checkpoint.py``. weight_format: one of
    ``weight_formats.py`` on both sides; ours is then drawn in the process, without an engine.
    """

    work: Path
    peer: Path | None = None
    peer_python: Path | None = None
    layers: int | None = None
    check: bool = True
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    weights: str = NORMAL
    weight_format: str | None = None
    began: float = field(default_factory=time.perf_counter)

    def checkpoint(self, shape: str) -> Path:
        """The checkpoint of a shape, made on first use."""
        folder = self.work / self._model_name(shape)
        if not (folder / "config.json").exists():
            layers = ["--layers", str(self.layers)] if self.layers else []
            self._run_module(
                "benchmarks.make_checkpoint", shape, str(folder), *layers, "--weights", self.weights
            )
        return folder

    def engine(self, shape: str) -> Path:
        """The engine of a shape, made and built on first use."""
        engine = self.work / f"{self._model_name(shape)}.engine"
        if not engine.exists():
            dtype = str(with_num_layers(shape)["torch_dtype"])
            self._build(self.checkpoint(shape), engine, "--dtype", dtype)
        return engine

    def _model_name(self, shape: str) -> str:
        layers = f"-{self.layers}l" if self.layers else ""
        return shape + layers + (f"-{self.weights}" if self.weights != NORMAL else "")

    def cpu_engine(self, gguf: Path, recipe: str = "int8") -> Path:
        """The engine that stands beside llama.cpp: bfloat16 activations, weights by ``recipe``."""
        engine = self.work / f"{gguf.stem}.{recipe}.engine"
        if not engine.exists():
            self._build(gguf.resolve(), engine, "--dtype", "bfloat16", "-q", recipe)
        return engine

    def _build(self, checkpoint: Path, engine: Path, *flags: str) -> None:
        check = [] if self.check else ["--no-check"]
        self._run_module("modelmill", "build", str(checkpoint), "-o", str(engine), *flags, *check)

    def start_module(
        self, name: str, python: str, module: str, arguments: Mapping[str, Any]
    ) -> PeerProcess:
        """Start a side that is a module of ``benchmarks`` with one JSON argument."""
        log = self.work / "logs" / f"{name.replace(' ', '-')}.log"
        command = [python, "-m", f"benchmarks.{module}", json.dumps(arguments)]
        return PeerProcess(name, command, log)

    def synthetic_config(self, shape: str) -> Path:
        """A folder with the shape's config as peers read it."""
        own = self.weight_format if self.weight_format in VLLM_FORMATS else None
        return write_synthetic_config(
            with_num_layers(shape, self.layers),
            self.work / (f"{shape}-{own}-proxy" if own else f"{shape}-proxy"),
            own,
        )

    def _run_module(self, module: str, *arguments: str) -> None:
        began = time.perf_counter()
        self.note(f"{module} {arguments[0]} …")
        subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        self.note(f"{module} {arguments[0]}: {time.perf_counter() - began:.1f} s")

    def start_peer(
        self, name: str, shape: str, share: float, max_num_seqs: int | None = None
    ) -> PeerProcess:
        """Start one side's process: vLLM, transformers, or a variant of modelmill.

        max_num_seqs: None leaves it to the side.
        """
        dtype = str(with_num_layers(shape)["torch_dtype"])
        longest = min(
            MAX_MODEL_LEN, int(str(with_num_layers(shape).get("n_positions", MAX_MODEL_LEN)))
        )
        log = self.work / "logs" / f"{name}.log"
        limits: dict[str, Any] = {
            "gpu_memory_utilization": share,
            "max_model_len": longest,
        }
        if max_num_seqs is not None:
            limits["max_num_seqs"] = max_num_seqs
        if name not in PEERS:
            model: dict[str, Any] = (
                {"shape": shape, "weight_format": self.weight_format}
                if self.weight_format
                else {"engine": str(self.engine(shape))}
            )
            peer_options = model | {"run": {**limits, **self.variants.get(name, {})}}
            return PeerProcess(
                name,
                [sys.executable, "-m", "benchmarks.modelmill_peer", json.dumps(peer_options)],
                log,
            )
        peer_options = {"config": str(self.synthetic_config(shape)), "dtype": dtype}
        if name == "transformers":
            return PeerProcess(
                name,
                [sys.executable, "-m", "benchmarks.transformers_peer", json.dumps(peer_options)],
                log,
            )
        limits |= {"dtype": dtype}  # the CUDA graphs that vLLM captures are its own choice
        if self.weight_format == "fp8":
            limits |= {"quantization": "fp8"}
        return self.start_vllm(name, self.synthetic_config(shape), limits)

    def start_vllm(
        self, name: str, folder: Path, run: Mapping[str, Any], *, images: bool = False
    ) -> PeerProcess:
        """Start vLLM on a folder of config files.

        run: arguments of ``vllm.LLM``; images: whether requests bring pictures.
        """
        python, env = self._vllm()
        options: dict[str, Any] = {"config": str(folder.resolve()), "run": dict(run)}
        options |= {"images": True} if images else {}
        command = [python, "-m", "benchmarks.vllm_peer", json.dumps(options)]
        return PeerProcess(name, command, self.work.resolve() / "logs" / f"{name}.log", env)

    def vllm_environment(self, *, in_process: bool) -> tuple[str, dict[str, str]]:
        """The interpreter that has vLLM, and its environment.

        in_process: whether its engine runs in the process that is started.
        """
        python, env = self._vllm()
        if not in_process:
            env = {name: value for name, value in env.items() if "MULTIPROCESSING" not in name}
        return python, os.environ | env

    def _vllm(self) -> tuple[str, dict[str, str]]:
        """The interpreter that has vLLM, and what to add to its environment."""
        env = ENVIRONMENT | {"VLLM_CACHE_ROOT": str(self.work / "vllm-cache")}
        if self.peer is None:
            return str(self.peer_python), env
        site = self.peer.resolve()
        site = site / "site" if (site / "site").is_dir() else site
        # one folder of it holds a library that others are linked to
        env |= {
            "PYTHONPATH": str(site),
            "LD_LIBRARY_PATH": f"{site / 'tvm_ffi' / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}",  # noqa: E501
        }
        return str(self.peer_python or sys.executable), env

    @contextlib.contextmanager
    def open_peers(
        self, names: Sequence[str], shape: str, share: float, max_num_seqs: int | None = None
    ) -> Iterator[list[PeerProcess]]:
        """Start the sides and randomize their weights.

        One after the other: a neighbour's memory must not move meanwhile. max_num_seqs: None
        leaves it to each side.
        """
        with contextlib.ExitStack() as stack:
            sides = []
            for name in names:
                side = self.start_peer(name, shape, share, max_num_seqs)
                stack.callback(side.close)
                try:
                    side.ready()
                except PeerError as error:
                    if name not in PEERS:
                        raise
                    self.note(f"going on without the peer: {error}")
                    continue
                self.note(f"{name} is ready after {time.perf_counter() - side.start_time:.1f} s")
                side.randomize_weights(self.weights)
                sides.append(side)
            yield sides

    def note(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)
