"""The engine's loop: requests in, tokens out, one step at a time.

On a GPU the next step is launched before the tokens of the last one are read, so that the GPU never waits for Python.
What the host does not know yet (the last token) stays on the device; what it decides (who runs, where pages are)
follows from counts alone. A sequence that turns out to have ended costs one wasted row.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelmill.artifact.manifest import check_kind
from modelmill.artifact.store import Artifact, open_artifact
from modelmill.artifact.verify import verify
from modelmill.core.config import RunConfig
from modelmill.core.types import Finish, Request, Token
from modelmill.nn.kv import KVCache, held_dtype
from modelmill.ops.shelf import beating, resolve
from modelmill.ops.tuning import Tuning
from modelmill.parallel.mesh import ALONE, Mesh
from modelmill.runtime import fit, memory
from modelmill.runtime.batch import Packer
from modelmill.runtime.check import Bounds
from modelmill.runtime.device import devices, use_threads
from modelmill.runtime.device import pick_device as pick_device
from modelmill.runtime.entry import Entry
from modelmill.runtime.expand import prepare_weights
from modelmill.runtime.eyes import Eyes
from modelmill.runtime.flight import Flight
from modelmill.runtime.ledger import Ledger
from modelmill.runtime.load import load, part_of
from modelmill.runtime.pages import PagePool
from modelmill.runtime.ranks import Crew
from modelmill.runtime.runner import Runner
from modelmill.runtime.sampler import Sampler
from modelmill.runtime.scheduler import Schedule, Scheduler
from modelmill.runtime.score import Score
from modelmill.runtime.sequence import RopeRule
from modelmill.runtime.stats import Stats
from modelmill.runtime.taps import After, Before
from modelmill.runtime.tuned import tuning_for

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
_CALM = 100


class Loop:
    """One model on one device with its KV pages. Not thread-safe: one thread calls ``add`` and ``step``."""

    def __init__(
        self,
        model: nn.Module,
        config: RunConfig | None = None,
        *,
        max_model_len: int | None = None,
        digest: str = "",
        artifact: Artifact | None = None,
        overlap: bool | None = None,
        tuning: Tuning | None = None,
        mesh: Mesh = ALONE,
    ) -> None:
        """A loop around a loaded model. digest: identifies the weights in prefix keys. overlap: launch steps ahead.

        tuning: launch sizes for this device. mesh: of which rank this is the loop; above 0 only its runner is used.
        """
        self.config = config = config or RunConfig()
        self.artifact = artifact
        self.model = model
        self.device = memory.device_of(model)
        self.dtype = memory.activation_dtype(model)
        self.kv_dtype = held_dtype(config.kv_cache_dtype, self.dtype)
        self.ops = resolve(self.device, config.kernels, tuning)
        prepare_weights(model, self.ops, self.dtype, self.device, mesh)
        self.vocab = int(model.config.vocab)  # type: ignore[union-attr, arg-type]
        self.max_model_len = fit.longest(model, config, max_model_len)
        self.page_size = config.page_size
        self._rope = RopeRule.of(model)
        self.num_pages = memory.count_pages(model, self.ops, config, self.kv_dtype, self.max_model_len, mesh)
        self.bounds = Bounds(
            self.vocab,
            self.max_model_len,
            self.num_pages * self.page_size,
            min(config.max_num_seqs, config.max_num_batched_tokens),
        )
        cuda = self.device.startswith("cuda")
        width = -(-self.max_model_len // self.page_size)
        limits = fit.limits(model, config, on_gpu=cuda)
        kept = memory.kept_pages(config, self.num_pages, self.page_bytes, self.device)
        self.scheduler = Scheduler(limits, PagePool(self.num_pages, kept), width)
        # the last page is scrap: some variants write padding there
        kv = KVCache.allocate(model.kv, self.num_pages + 1, self.page_size, self.kv_dtype, self.device)  # type: ignore[arg-type]
        packer = Packer(self.scheduler.tables, self.page_size, self.device)
        self.eyes = Eyes(model, self.ops, self.device, graphs=cuda and config.cuda_graphs)
        self.sampler = Sampler(self.vocab, self.device, self.ops)
        self.runner = Runner(model, self.ops, kv, packer, self.sampler, config.max_num_seqs, mesh)
        self._overlap = cuda if overlap is None else overlap
        self.runner.keep = self._overlap or cuda
        if cuda:
            fit.fit_on_gpu(self.runner, config, width)
        self.ledger = Ledger(self.scheduler, self.sampler)
        self._end: Callable[[], Any] | None = None
        self.entry = Entry(self.ledger, self.eyes, self._rope, self.bounds, seed=config.seed, digest=digest)
        self._events: list[Token] = []
        self._flight: Flight | None = None
        self._calm = self._steps = 0
        self._told = 0.0
        # seconds that steps take, of which the pieces of prompts follow
        self.clock: Callable[[], float] = time.perf_counter

    @classmethod
    def open(cls, engine: Path | Artifact, config: RunConfig | None = None) -> Loop:
        """Load an engine; a path's files are checked against their sha256 first (``artifact.verify``).

        Kernels switched at build stay switched, and its default for the KV cache stays, unless ``config`` says
        otherwise. Raises ArtifactError, CapacityError, MissingDependency, UsageError, RankError.
        """
        config = config or RunConfig()
        artifact = engine if isinstance(engine, Artifact) else open_artifact(Path(engine))
        check_kind(artifact.path, artifact.manifest.kind, "language")
        check = verify if not isinstance(engine, Artifact) else lambda _: None
        config = replace(config, kernels={**artifact.manifest.build["kernels"], **config.kernels})
        if config.kv_cache_dtype == "auto":
            config = replace(config, kv_cache_dtype=artifact.manifest.build.get("kv_cache_dtype", "auto"))
        device = pick_device(config.device)
        if config.tp == 1:
            check(artifact)
            return cls.part(artifact, config, device)
        part_of(artifact, Mesh(size=config.tp))  # before processes are started: whether it can be split so
        crew = Crew(artifact.path, config, devices(device, config.tp))
        try:
            with crew.guard():
                check(artifact)
                loop = cls.part(artifact, config, device, crew.meet())
        except BaseException:
            crew.close()
            raise
        loop.runner.crew = crew
        loop._end = weakref.finalize(loop, _close, crew, loop.runner)
        return loop

    @classmethod
    def part(cls, artifact: Artifact, config: RunConfig, device: str, mesh: Mesh = ALONE) -> Loop:
        """The loop of one rank."""
        if device == "cpu":
            use_threads(config.threads, mesh.size)
        model = load(artifact, device, mesh)
        manifest = artifact.manifest
        length, digest, tuning = manifest.max_model_len, manifest.digest(), tuning_for(artifact.path, device)
        return cls(model, config, max_model_len=length, digest=digest, artifact=artifact, tuning=tuning, mesh=mesh)

    def close(self) -> None:
        """End the other ranks, where there are any; the loop is of no use then. Called when it is forgotten, too."""
        if self._end is not None:
            self._end()

    @property
    def page_bytes(self) -> int:
        """Of one KV page, on this rank."""
        return int(self.model.kv.page_bytes(self.page_size, self.kv_dtype))  # type: ignore[operator, union-attr]

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do or to tell."""
        return bool(self._events or self._flight or self.scheduler.running or self.scheduler.waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError where it can never be served."""
        self.entry.add(request)

    def add_all(self, requests: Iterable[Request]) -> None:
        """Queue requests that were handed in together: those that may get the longest answers are served first.

        All of them are done when the last one is, and a long answer that begins late ends alone, at the price of a
        whole step for each token. What is drawn at random does not depend on this order. Raises RequestError where one
        can never be served; those before it in this order stay queued.
        """
        self.entry.add_all(requests)

    def abort(self, request_id: str) -> None:
        """End a request now; the next step tells ABORT for each of its sequences. Unknown ids are ignored."""
        seqs = list(self.ledger.live.get(request_id, ()))
        beams = bool(seqs) and seqs[0].beam is not None
        ended = range(seqs[0].request.params.n) if beams else [s.index for s in seqs if s.finish is None]
        self._events += [Token(request_id, index, None, finish=Finish.ABORT) for index in ended]
        for seq in seqs:
            self.ledger.drop(seq, Finish.ABORT)

    def finish(self, request_id: str, index: int) -> None:
        """End one sequence (of a beam search: all of it) quietly: a stop string was found in its text."""
        for seq in list(self.ledger.live.get(request_id, ())):
            if seq.index == index or seq.beam is not None:
                self.ledger.drop(seq, Finish.STOP)

    def step(self) -> list[Token]:
        """Schedule, run, sample, and tell what came of it. Raises RankError where another rank has ended."""
        with self.runner.guarded():
            return self._step()

    def _step(self) -> list[Token]:
        events, self._events = self._events, []
        # what was launched ahead runs since the step before it has been told
        began = self.clock() if self._flight is None else self._told
        flight = self._flight or self._launch(self.scheduler.schedule())
        self._flight = self._launch_ahead(flight)
        if flight is not None:
            events += self.ledger.settle(flight)
            self._told = self.clock()
            self.scheduler.timed(flight.schedule, self._told - began)
        return events

    def ping(self) -> None:
        """Wait until every other rank has answered that it lives. Raises RankError where one has ended."""
        if self.runner.crew is not None:
            with self.runner.guarded():
                self.runner.crew.ping()

    def beat_with(self, beat: Callable[[], None]) -> None:
        """Call ``beat`` after every operation from now on, so that who watches a long step sees that it goes on.

        Replayed graphs have no operations to see.
        """
        self.ops = self.runner.ops = self.sampler.ops = beating(self.ops, beat)
        self.eyes.use_ops(self.ops)

    def stats(self) -> Stats:
        """Counters and gauges of this moment."""
        pool, scheduler = self.scheduler.pool, self.scheduler
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages=self.num_pages,
            free_pages=pool.available,
            cached_pages=pool.cached,
            steps=self._steps,
            prompt_tokens=self.ledger.prompt_tokens,
            output_tokens=self.ledger.output_tokens,
            cached_tokens=self.ledger.cached_tokens,
            preemptions=scheduler.preemptions,
            idle_pages=pool.idle,
            kept_pages=pool.kept,
            # a GPU's are there from the start
            touched_pages=pool.touched if self.device == "cpu" else self.num_pages,
            page_bytes=self.page_bytes * self.runner.mesh.size,
        )

    def warm_up(self, largest: int | None = None, *, forms: bool = False) -> None:
        """Record the graphs for decoding up to ``largest`` sequences now, not when they are first needed.

        forms: meet every kernel that steps with prompts may take as well (``warm``) and record those of short prompts
        (``prompt_graph``), for who serves people: compiling takes half a minute, once a machine.
        """
        self.eyes.warm_up()
        if self.runner.graphs is not None:
            sequences = min(largest or self.config.max_num_seqs, self.runner.graphs.largest)
            self.runner.warm_up(sequences, self.config.max_num_batched_tokens, forms=forms)

    def scorer(self) -> Score:
        """Runs given tokens through the loop's own pages, for measuring; see ``Score``."""
        return Score(self.runner, self.scheduler, self._rope, self.config.max_num_batched_tokens)

    def score(self, ids: list[list[int]], decode_from: int | None = None) -> list[torch.Tensor]:
        """Logits [T, V] float32 on the CPU of each list of ids; from ``decode_from`` on token by token."""
        return self.scorer().logits(ids, decode_from)

    def trace(
        self,
        ids: list[list[int]],
        pattern: str = "*",
        *,
        decode_from: int | None = None,
        before: Before | None = None,
        after: After | None = None,
    ) -> dict[str, list[Any]]:
        """Score ``ids`` and keep the outputs of the modules whose names match ``pattern``, one per step, on the CPU.

        before and after are called for every module, as in ``Runner.tap``.
        """
        return self.scorer().trace(ids, pattern, decode_from, before=before, after=after)

    def _launch(self, plan: Schedule | None) -> Flight | None:
        if plan is None or not (plan.work or plan.ended):
            return None
        try:
            flight = self.runner.launch(plan)
        except OUT_OF_MEMORY:
            if self.runner.crew is not None:
                raise  # the other ranks are in this step: it cannot be made smaller
            return self._relieve(plan)
        self._count_step(plan)
        return flight

    def _launch_ahead(self, flight: Flight | None) -> Flight | None:
        """The next step, before the last one's tokens are read; None where it depends on them."""
        if (
            not self._overlap
            or flight is None
            or self.ledger.searches
            or self.ledger.guided
            or flight.schedule.forks
            or flight.schedule.ended
        ):
            return None
        plan = self.scheduler.schedule(ahead=True)
        if plan is None or not plan.work:
            return None
        try:
            ahead = self.runner.launch(plan)
        except OUT_OF_MEMORY:
            if self.runner.crew is not None:
                raise
            return None
        self._count_step(plan)
        return ahead

    def _count_step(self, plan: Schedule) -> None:
        self.scheduler.advance(plan)
        self._steps += 1
        full = self.config.max_num_batched_tokens
        if self.scheduler.budget < full:
            # memory was short: try larger steps again after a while
            self._calm += 1
            if self._calm >= _CALM:
                self._calm = 0
                self.scheduler.budget = min(2 * self.scheduler.budget, full)

    def _relieve(self, plan: Schedule) -> Flight:
        """A step did not fit: try a smaller one; a sequence that does not fit alone is given up."""
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()
        seqs = [seq for seq, _ in plan.work]
        widest = max((s.request.params.num_beams for s in seqs), default=1)
        self._calm = 0
        if plan.tokens // 2 >= widest:
            self.scheduler.budget = plan.tokens // 2
        else:
            self.abort(max(seqs, key=lambda s: s.key).request.id)
            self.scheduler.budget = self.config.max_num_batched_tokens
        return Flight(Schedule(ended=plan.ended))


def _close(crew: Crew, runner: Runner) -> None:
    """Graphs go first: a communicator that one of them has recorded waits for it."""
    runner.graphs = None
    crew.close()
