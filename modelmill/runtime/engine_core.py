"""The engine core: queues requests and returns tokens, one step at a time.

``step`` reads schedule, run, sample, process: the scheduler picks the tokens of all sequences, the
model runner computes them and samples, the output processor appends the ids and ends sequences.

On a GPU the next step is launched before the tokens of the current one are read (async scheduling),
so that the GPU never waits for Python. The last sampled token stays on the device; the schedule
(which sequences run, which pages they use) depends on token counts alone. If the token that is
still unread ends a sequence, the step launched ahead has computed one row in vain.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from modelmill.artifact.manifest import check_engine_type
from modelmill.artifact.store import Artifact, open_artifact
from modelmill.artifact.verify import verify_file_hashes
from modelmill.core.config import RunConfig
from modelmill.core.errors import RequestError
from modelmill.core.types import EngineStats, FinishReason, Request, TokenOutput
from modelmill.loader import capacity
from modelmill.loader.device import rank_devices, resolve_device, set_cpu_threads
from modelmill.loader.model_loader import build_rank_model, load_model
from modelmill.loader.sleepable_memory import SleepableMemory
from modelmill.loader.state_capacity import StateCapacity
from modelmill.loader.tuned_launch_configs import load_tuning
from modelmill.loader.unpack_weights import unpack_weights_without_kernels
from modelmill.nn.kv import KVCache, Zeros, kv_cache_dtype, lazily_backed_zeros
from modelmill.nn.latent_attention import LatentExpansionPolicy
from modelmill.nn.layer_stack import model_state_shape
from modelmill.nn.recurrent_state import RecurrentStateCache
from modelmill.nn.shard_model import num_experts_by_rank
from modelmill.nn.whole_model_decode import model_kv_shape
from modelmill.ops.launch_configs import TunedLaunchConfigs
from modelmill.ops.registry import select_backends, with_heartbeat
from modelmill.parallel.tp_group import SINGLE_RANK, TPGroup
from modelmill.runtime import cuda_graphs, warmup
from modelmill.runtime.batch import BatchPacker, reserve_step_buffers
from modelmill.runtime.chunked_prefill import default_max_mixed_tokens
from modelmill.runtime.input_processor import InputProcessor, MakeGuide
from modelmill.runtime.kv_pages import PagePool
from modelmill.runtime.model_runner import ModelRunner
from modelmill.runtime.output_processor import OutputProcessor
from modelmill.runtime.pending_step import PendingStep
from modelmill.runtime.sampler import Sampler
from modelmill.runtime.scheduler import Schedule, Scheduler, SchedulerLimits
from modelmill.runtime.sequence import RequestLimits, RopeFrequencyRule, Sequence
from modelmill.runtime.state_snapshots import StateSnapshotCache
from modelmill.runtime.tp_worker_pool import TPWorkerPool
from modelmill.vision.encoder_runner import VisionEncoderRunner

OUT_OF_MEMORY_ERRORS = (torch.OutOfMemoryError, MemoryError)
_STEPS_UNTIL_BUDGET_REGROWTH = 100


class EngineCore:
    """One model on one device with its KV pages.

    Not thread-safe: one thread calls ``add`` and ``step``.
    """

    # sequences of a step launched ahead that failed
    _sequences_of_failed_step: tuple[Sequence, ...] = ()

    def __init__(
        self,
        model: nn.Module,
        config: RunConfig | None = None,
        *,
        max_model_len: int | None = None,
        digest: str = "",
        artifact: Artifact | None = None,
        overlap: bool | None = None,
        tuning: TunedLaunchConfigs | None = None,
        tp_group: TPGroup = SINGLE_RANK,
        tp_workers: TPWorkerPool | None = None,
    ) -> None:
        """Allocate the KV cache and set up the step loop for a loaded model.

        Args:
            model: The model, on its device.
            config: Run options.
            max_model_len: Of the engine; None: of the model.
            digest: Identifies the weights in prefix cache keys.
            artifact: The engine folder that the model was loaded from.
            overlap: Whether to launch steps ahead; None: on a GPU only.
            tuning: Launch configs for this device.
            tp_group: This rank's group; ranks above 0 use only ``model_runner``.
            tp_workers: On rank 0: the other ranks, which this engine core ends with itself.
        """
        self.config = config = config or RunConfig()
        self.artifact, self.digest = artifact, digest
        self.model = model
        self.device = capacity.model_device(model)
        self.dtype = capacity.activation_dtype(model)
        self.kv_dtype = kv_cache_dtype(config.kv_cache_dtype, self.dtype)
        self.ops = select_backends(self.device, config.kernels, tuning)
        if self.device == "cpu":
            unpack_weights_without_kernels(model, self.ops, self.dtype, tp_group)
        self.vocab = int(model.config.vocab)  # type: ignore[union-attr, arg-type]
        self.max_model_len = capacity.resolve_max_model_len(model, config, max_model_len)
        self.page_size = config.page_size
        self.rope_length_source = RopeFrequencyRule.from_model(model)
        decode, ranks = self.ops.decode, tp_group.size
        self.kv_shape = model_kv_shape(model, self.max_model_len, decode, self.kv_dtype, ranks)
        self.state_capacity, self.num_pages = self._plan_cache_sizes_and_cap_max_seqs(tp_group)
        config = self.config
        self.request_limits = self._make_request_limits()
        cuda = self.device.startswith("cuda")
        width = -(-self.max_model_len // self.page_size)
        self.scheduler = self._make_scheduler(width)
        memory, kv, states, padding = self._allocate_caches()
        packer = self._make_packer(padding)
        graphs = cuda and config.cuda_graphs
        self.vision_runner = VisionEncoderRunner(model, self.ops, self.device, graphs=graphs)
        self.sampler = Sampler(self.vocab, self.device, self.ops)
        self._overlap = cuda if overlap is None else overlap
        if cuda:
            reserve_step_buffers(packer, config, width)
        self.model_runner = ModelRunner(
            model,
            self.ops,
            kv,
            packer,
            self.sampler,
            config.max_num_seqs,
            tp_group,
            tp_workers=tp_workers,
            graph_limits=self._graph_limits(width),
            keep_last_ids=self._overlap or cuda,
            states=states,
            memory=memory,
        )
        self.output_processor = OutputProcessor(self.scheduler, self.sampler)
        self._finalizer = _make_rank_finalizer(self, tp_workers)
        self.input_processor = InputProcessor(
            self.output_processor,
            self.vision_runner,
            self.rope_length_source,
            self.request_limits,
            seed=config.seed,
            digest=digest,
        )
        self._events: list[TokenOutput] = []
        self._pending: PendingStep | None = None
        self._steps_since_oom = self._num_steps = 0
        self._last_output_time = 0.0
        # times steps for AdaptiveChunkSize; tests replace it
        self.clock: Callable[[], float] = time.perf_counter

    def _plan_cache_sizes_and_cap_max_seqs(
        self, tp_group: TPGroup
    ) -> tuple[StateCapacity | None, int]:
        """The slots of recurrent state, if the model keeps any, and the KV pages.

        As many sequences run as there are slots for.
        """
        config = self.config
        device_bytes = capacity.total_gpu_bytes(self.device)
        graph_bytes = cuda_graphs.max_prefill_graph_bytes(config, device_bytes)
        state = capacity.model_state_capacity(self.model, self.ops, config, tp_group, graph_bytes)
        if state is not None:
            self.config = config = replace(config, max_num_seqs=state.sequences)
        pages = capacity.determine_num_kv_pages(
            self.model, self.ops, config, self.kv_dtype, self.max_model_len, tp_group, graph_bytes,
            state,
        )  # fmt: skip
        return state, pages

    def _graph_limits(self, max_pages_per_seq: int) -> cuda_graphs.GraphLimits | None:
        device_bytes = capacity.total_gpu_bytes(self.device)
        return cuda_graphs.graph_limits(self.config, max_pages_per_seq, device_bytes)

    def _make_request_limits(self) -> RequestLimits:
        """What a request may ask of this engine core."""
        max_seqs = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        windows = self.kv_shape.group_windows
        kv_tokens = self.num_pages // len(windows) * self.page_size
        if windows != (None,):
            # the pages inside the windows of the longest sequence fit: capacity has checked it
            kv_tokens = max(kv_tokens, self.max_model_len)
        return RequestLimits(self.vocab, self.max_model_len, kv_tokens, max_seqs)

    def _make_packer(self, state_padding: int | None) -> BatchPacker:
        scheduler = self.scheduler
        expansion = LatentExpansionPolicy.for_model(self.model, lambda: scheduler.step_token_budget)
        return BatchPacker(scheduler.tables, self.page_size, self.device, state_padding, expansion)

    def _make_scheduler(self, width: int) -> Scheduler:
        """The scheduler of the KV pages; ``width``: pages of the longest sequence."""
        limits = replace(
            scheduler_limits(self.model, self.config, on_gpu=self.device.startswith("cuda")),
            windows=self.kv_shape.group_windows,
            page_id_strides=self.kv_shape.page_id_strides,
        )
        max_idle_prefix_cache_pages = capacity.max_idle_prefix_cache_pages(
            self.config, self.num_pages, self.page_bytes, self.device
        )
        states = None
        if self.state_capacity is not None:
            sizes = self.state_capacity
            states = StateSnapshotCache(sizes.sequences, sizes.snapshots, self.page_size)
        pool = PagePool(self.num_pages, max_idle_prefix_cache_pages, len(limits.windows))
        return Scheduler(limits, pool, width, states)

    def _allocate_caches(
        self,
    ) -> tuple[SleepableMemory | None, KVCache, RecurrentStateCache | None, int | None]:
        """The memory that sleeps, if any, the KV pages, the states and their padding slot."""
        memory = SleepableMemory(self.device) if self.config.enable_sleep_mode else None
        zeros = lazily_backed_zeros if memory is None else memory.allocate_cache_zeros
        return memory, self._allocate_pages(zeros), *self._allocate_states(zeros)

    def _allocate_pages(self, zeros: Zeros) -> KVCache:
        """The KV pages, one more than the pool has: kernels write the padding rows there."""
        count, dtype = self.num_pages + 1, self.kv_dtype
        return KVCache.allocate(
            self.kv_shape, count, self.page_size, dtype, self.device, zeros=zeros
        )

    def _allocate_states(self, zeros: Zeros) -> tuple[RecurrentStateCache | None, int | None]:
        """The recurrent states of all slots, and the padding slot; None without any."""
        if self.state_capacity is None:
            return None, None
        slots = self.state_capacity.num_slots
        shape = model_state_shape(self.model)
        cache = RecurrentStateCache.allocate(shape, slots, self.dtype, self.device, zeros=zeros)
        return cache, slots - 1

    @property
    def opened_artifact(self) -> Artifact:
        """Return the engine folder of an engine core that ``open`` made."""
        assert self.artifact is not None, "made by EngineCore.open"
        return self.artifact

    @classmethod
    def open(cls, engine: Path | Artifact, config: RunConfig | None = None) -> EngineCore:
        """Load an engine folder, after its files were checked against their sha256.

        ``config`` overrides the kernels and the KV cache dtype that were set at build time.

        Args:
            engine: A path, or an open Artifact, whose files are not checked again.
            config: Run options.

        Raises:
            ArtifactError: The folder is not an intact engine.
            CapacityError: Weights or KV cache do not fit.
            MissingDependency: A package that this engine needs is not installed.
            UsageError: An option does not apply here.
            RankError: Another rank has failed.
        """
        config = config or RunConfig()
        artifact = engine if isinstance(engine, Artifact) else open_artifact(Path(engine))
        check_engine_type(artifact.path, artifact.manifest.engine_type, "language")
        check = verify_file_hashes if not isinstance(engine, Artifact) else lambda _: None
        config = replace(config, kernels={**artifact.manifest.build["kernels"], **config.kernels})
        if config.kv_cache_dtype == "auto":
            config = replace(
                config, kv_cache_dtype=artifact.manifest.build.get("kv_cache_dtype", "auto")
            )
        device = resolve_device(config.device)
        if config.tp == 1:
            check(artifact)
            return cls.load_for_rank(artifact, config, device)
        # fails before processes are started if the model cannot be split over this many ranks
        build_rank_model(artifact, TPGroup(size=config.tp), config.enable_expert_parallel)
        workers = TPWorkerPool(artifact.path, config, rank_devices(device, config.tp))
        try:
            with workers.translate_errors():
                check(artifact)
                return cls.load_for_rank(artifact, config, device, workers.connect(), workers)
        except BaseException:
            workers.close()
            raise

    @classmethod
    def load_for_rank(
        cls,
        artifact: Artifact,
        config: RunConfig,
        device: str,
        tp_group: TPGroup = SINGLE_RANK,
        tp_workers: TPWorkerPool | None = None,
    ) -> EngineCore:
        """Load the engine core of one rank."""
        if device == "cpu":
            set_cpu_threads(config.threads, tp_group.size)
        model = load_model(artifact, device, tp_group, config.enable_expert_parallel)
        return cls(
            model,
            config,
            max_model_len=artifact.manifest.max_model_len,
            digest=artifact.manifest.digest(),
            artifact=artifact,
            tuning=load_tuning(artifact.path, device),
            tp_group=tp_group,
            tp_workers=tp_workers,
        )

    def close(self) -> None:
        """End the other ranks; the engine core cannot be used afterwards.

        A finalizer does the same when the object is garbage-collected.
        """
        if self._finalizer is not None:
            self._finalizer()

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV page on this rank."""
        return self.kv_shape.page_bytes(self.page_size, self.kv_dtype)

    @property
    def state_cache_bytes(self) -> int:
        """Bytes of recurrent state on this rank, of running sequences and of the prefix cache."""
        return 0 if self.state_capacity is None else self.state_capacity.nbytes

    @property
    def num_experts_by_rank(self) -> tuple[int, ...]:
        """Experts of a mixture that each rank has as a whole; empty where experts are divided."""
        if not self.config.enable_expert_parallel:
            return ()
        return num_experts_by_rank(self.model, self.config.tp)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to run or to return."""
        return bool(
            self._events or self._pending or self.scheduler.running or self.scheduler.waiting
        )

    def add(self, request: Request, make_guide: MakeGuide | None = None) -> None:
        """Queue a request.

        Args:
            request: The request.
            make_guide: Makes the guides of its sequences if it has a grammar; None: no structured
                output.

        Raises:
            RequestError: It can never be served, or the engine sleeps.
        """
        self._check_awake()
        self.input_processor.add(request, make_guide)

    def add_all(self, requests: Iterable[Request], make_guide: MakeGuide | None = None) -> None:
        """Queue a batch of requests, those with the largest output limit first.

        The batch is done when its last request is, and a long output that starts late runs alone at
        the end, one step per token. Random numbers do not depend on this order.

        Args:
            requests: The requests.
            make_guide: As for ``add``, for each request with a grammar.

        Raises:
            RequestError: One of them can never be served; those before it in this order stay
                queued.
        """
        self._check_awake()
        self.input_processor.add_all(requests, make_guide)

    def _check_awake(self) -> None:
        memory = self.model_runner.memory
        if memory is not None and memory.is_asleep:
            raise RequestError("the engine sleeps; wake it up first")

    def abort(self, request_id: str) -> None:
        """End a request now; the next step returns ABORT for each of its sequences.

        Unknown ids are ignored.
        """
        seqs = list(self.output_processor.live_sequences.get(request_id, ()))
        # a beam search has width many sequences but n outputs
        beams = bool(seqs) and seqs[0].beam_search is not None
        indices = (
            range(seqs[0].request.params.n)
            if beams
            else [s.index for s in seqs if s.finish_reason is None]
        )
        self._events += [
            TokenOutput(request_id, index, None, finish_reason=FinishReason.ABORT)
            for index in indices
        ]
        for seq in seqs:
            self.output_processor.finish_sequence(seq, FinishReason.ABORT)

    def finish_on_stop_string(self, request_id: str, index: int) -> None:
        """End one sequence without an event, because its text contains a stop string.

        Ends all of a beam search.
        """
        for seq in list(self.output_processor.live_sequences.get(request_id, ())):
            if seq.index == index or seq.beam_search is not None:
                self.output_processor.finish_sequence(seq, FinishReason.STOP)

    def step(self) -> list[TokenOutput]:
        """Run one step: schedule, run, sample, process; return its outputs.

        Raises RankError if another rank has ended.
        """
        with self.model_runner.translate_rank_errors():
            self._preempt_for_recompute(self._sequences_of_failed_step)
            events, self._events = self._events, []
            started = self._step_start()
            step = self._pending or self._launch_step(self.scheduler.schedule())
            # step i + 1 first: processing step i waits for the GPU
            self._pending = self._launch_ahead(step)
            return events + self._process_step_results(step, started)

    def ping_tp_workers(self) -> None:
        """Wait until every other rank has replied. Raises RankError if one has ended."""
        if self.model_runner.tp_workers is not None:
            with self.model_runner.translate_rank_errors():
                self.model_runner.tp_workers.ping()

    def set_heartbeat(self, heartbeat: Callable[[], None]) -> None:
        """Call ``heartbeat`` after every op from now on, so that a watchdog sees a long step run.

        Ops in replayed graphs do not call it.
        """
        self.ops = with_heartbeat(self.ops, heartbeat)
        for user in (self.model_runner, self.sampler, self.vision_runner):
            user.set_ops(self.ops)

    def stats(self) -> EngineStats:
        """Counters since the start, and current gauges."""
        pool, scheduler = self.scheduler.pool, self.scheduler
        states, ranks = scheduler.states, self.model_runner.tp_group.size
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages=self.num_pages,
            free_pages=pool.num_available,
            cached_pages=pool.num_cached,
            steps=self._num_steps,
            prompt_tokens=self.output_processor.prompt_tokens,
            output_tokens=self.output_processor.output_tokens,
            cached_tokens=self.output_processor.cached_tokens,
            preemptions=scheduler.preemptions,
            evictable_pages=pool.num_evictable,
            kept_pages=pool.max_idle,
            # a GPU cache is allocated as a whole; in RAM a page takes memory when first written
            touched_pages=pool.num_touched if self.device == "cpu" else self.num_pages,
            page_bytes=self.page_bytes * ranks,
            pages_by_window=scheduler.pages_by_window(),
            state_bytes=ranks * self.state_capacity.nbytes if self.state_capacity else 0,
            snapshot_slots=states.count if states else 0,
            snapshots=states.num_cached if states else 0,
            restored_states=states.restored if states else 0,
        )

    def warm_up(self, max_seqs: int | None = None, *, all_specializations: bool = False) -> None:
        """Capture the decode graphs now instead of at first use.

        Args:
            max_seqs: Up to this many sequences; None: up to ``max_num_seqs``.
            all_specializations: Also compile every kernel that steps with prompts may use
                (``runtime.warmup``) and capture the prefill graphs, for interactive serving.
                Compiling takes half a minute, once per machine.
        """
        self.vision_runner.warm_up()
        if self.model_runner.decode_graphs is not None:
            sequences = min(
                max_seqs or self.config.max_num_seqs, self.model_runner.decode_graphs.max_seqs
            )
            warmup.warm_up(
                self.model_runner,
                sequences,
                self.config.max_num_batched_tokens,
                all_specializations=all_specializations,
            )

    def _step_start(self) -> float:
        """When the current step starts.

        The GPU starts a step launched ahead when the previous step is done, not at its launch.
        """
        return self.clock() if self._pending is None else self._last_output_time

    def _launch_step(self, schedule: Schedule | None) -> PendingStep | None:
        """Launch a scheduled step without waiting for its tokens; None if there is no work.

        A step that does not fit into memory becomes a step without work; the next one is smaller.
        """
        if schedule is None or not (schedule.work or schedule.out_of_pages):
            return None
        try:
            step = self.model_runner.launch_sampling(self.model_runner.launch_forward(schedule))
        except OUT_OF_MEMORY_ERRORS:
            if self.model_runner.tp_workers is not None:
                raise  # the other ranks already run this step: it cannot be made smaller
            return self._shrink_step_or_abort_after_oom(schedule)
        self._update_after_launch(schedule)
        return step

    def _launch_ahead(self, step: PendingStep | None) -> PendingStep | None:
        """Launch the next step before the tokens of ``step`` are read.

        Returns None if the next step depends on these tokens.
        """
        if step is None or self._next_step_needs_tokens_of(step):
            return None
        schedule = self.scheduler.schedule(overlapped=True)
        if schedule is None or not schedule.work:
            return None
        try:
            launched = self.model_runner.launch_sampling(self.model_runner.launch_forward(schedule))
        except OUT_OF_MEMORY_ERRORS:
            if self.model_runner.tp_workers is not None:
                raise
            self._sequences_of_failed_step = tuple(seq for seq, _ in schedule.work)
            return None
        self._update_after_launch(schedule)
        return launched

    def _next_step_needs_tokens_of(self, step: PendingStep) -> bool:
        """Whether the step after ``step`` cannot be scheduled before its tokens are read."""
        # beams, guides and some processors need the tokens; forks and ends change the batch
        return bool(
            not self._overlap
            or self.output_processor.num_beam_searches
            or self.output_processor.num_guided
            or step.schedule.forks
            or step.schedule.out_of_pages
        )

    def _process_step_results(self, step: PendingStep | None, started: float) -> list[TokenOutput]:
        """Wait for a step, report its duration to the scheduler and return its outputs."""
        if step is None:
            return []
        events = self.output_processor.process(step)
        self._last_output_time = self.clock()
        self.scheduler.observe_step(step.schedule, self._last_output_time - started)
        return events

    def _preempt_for_recompute(self, seqs: Iterable[Sequence]) -> None:
        """Preempt sequences whose step failed: some layers have advanced their recurrent state."""
        self._sequences_of_failed_step = ()
        if self.scheduler.states is not None:
            for seq in seqs:
                if seq.table_row >= 0:
                    self.scheduler.preempt(seq)

    def _update_after_launch(self, schedule: Schedule) -> None:
        self.scheduler.update_after_launch(schedule)
        self._num_steps += 1
        full = self.config.max_num_batched_tokens
        if self.scheduler.step_token_budget < full:
            # reduced after an out-of-memory error: try larger steps again after a while
            self._steps_since_oom += 1
            if self._steps_since_oom >= _STEPS_UNTIL_BUDGET_REGROWTH:
                self._steps_since_oom = 0
                self.scheduler.set_step_token_budget(2 * self.scheduler.step_token_budget)

    def _shrink_step_or_abort_after_oom(self, schedule: Schedule) -> PendingStep:
        """Halve the step size after an out-of-memory error.

        If the step cannot be smaller, its latest request is aborted instead. Returns a step without
        work, so that the next one is scheduled with the new size.
        """
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()
        seqs = [seq for seq, _ in schedule.work]
        widest = max((s.request.params.num_beams for s in seqs), default=1)
        self._steps_since_oom = 0
        self._preempt_for_recompute(seqs)
        if schedule.num_tokens // 2 >= widest:
            self.scheduler.set_step_token_budget(schedule.num_tokens // 2)
        else:
            self.abort(max(seqs, key=lambda s: s.sort_key).request.id)
            self.scheduler.set_step_token_budget(self.config.max_num_batched_tokens)
        return PendingStep(Schedule(out_of_pages=schedule.out_of_pages))


def scheduler_limits(model: nn.Module, config: RunConfig, *, on_gpu: bool) -> SchedulerLimits:
    """Limits of a step; on a GPU the size of the weights decides ``max_mixed_tokens``."""
    mixed = config.max_mixed_tokens
    if mixed is None and on_gpu:
        mixed = default_max_mixed_tokens(
            capacity.weight_bytes(model), inputs_8bit=capacity.has_mostly_8bit_inputs(model)
        )
    return SchedulerLimits(
        config.max_num_batched_tokens,
        config.max_num_seqs,
        config.page_size,
        config.enable_prefix_caching,
        mixed,
        prefill_all_first=config.max_mixed_tokens is None,
    )


def _make_rank_finalizer(
    core: EngineCore, tp_workers: TPWorkerPool | None
) -> weakref.finalize[..., EngineCore] | None:
    """Ends the other ranks when the engine core is collected; None: there are none."""
    if tp_workers is None:
        return None
    return weakref.finalize(core, _close_other_ranks, tp_workers, core.model_runner)


def _close_other_ranks(tp_workers: TPWorkerPool, runner: ModelRunner) -> None:
    runner.free_graphs()
    tp_workers.close()
