"""Scores token ids that exist already, through the engine's KV pages, with the logits of serving.

Used by acceptance, comparison and dumps.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from fnmatch import fnmatch
from typing import Any

import torch

from modelmill.core.errors import CapacityError
from modelmill.core.types import Request, SamplingParams
from modelmill.nn.forward_hooks import PreHook
from modelmill.runtime.batch import LogitRowSpec
from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.scheduler import Schedule
from modelmill.runtime.sequence import Sequence

# most elements of the logits [rows, V] of one step
_MAX_LOGIT_ELEMENTS = 1 << 26
LogitsCallback = Callable[[int, int, torch.Tensor], None]


class TeacherForcedScorer:
    """Prefills given ids in chunks of at most ``max_tokens``, then decodes the rest, in batches.

    Attributes:
        step_tokens: The tokens of the running step, (list index, position).
        step_logit_rows: Those of its rows whose logits are computed.
    """

    def __init__(self, core: EngineCore) -> None:
        self.runner = core.model_runner
        self.scheduler = core.scheduler
        self.rope_length_source = core.rope_length_source
        self.max_tokens = core.config.max_num_batched_tokens
        self.step_tokens: list[tuple[int, int]] = []
        self.step_logit_rows: list[int] = []

    def compute_logits(
        self, ids: Seq[Seq[int]], decode_from: int | Seq[int] | None = None
    ) -> list[torch.Tensor]:
        """Compute the logits after each token of each list of ids.

        Args:
            ids: Token ids of each text.
            decode_from: From this position on, run one token per step; None: prefill all.

        Returns:
            [T, V] float32 on the CPU for each list.
        """
        vocab = self.runner.sampler.vocab
        out = [torch.empty(len(one), vocab) for one in ids]

        def store(index: int, first: int, logits: torch.Tensor) -> None:
            out[index][first : first + len(logits)] = logits.cpu()

        self.run_sequences(ids, decode_from, store)
        return out

    @torch.inference_mode()
    def run_sequences(
        self,
        ids: Seq[Seq[int]],
        decode_from: int | Seq[int] | None = None,
        on_logits: LogitsCallback | None = None,
        row_filter: Callable[[int, int], bool] | None = None,
    ) -> None:
        """Run the lists of ids and pass the logits to a callback.

        Args:
            ids: Token ids of each text.
            decode_from: Prompt length, one for all or one per list; it decides the rope
                frequency ids too. None: all ids are prompt.
            on_logits: Called with (list index, first position, logits [n, V] on the device).
            row_filter: (list index, position) → whether to compute its logits; None: all.

        Raises:
            CapacityError: A list does not fit into the free pages alone.
        """
        starts = (
            [decode_from] * len(ids)
            if decode_from is None or isinstance(decode_from, int)
            else list(decode_from)
        )
        todo = list(range(len(ids)))
        while todo:
            seqs, todo = self._start_sequences_that_fit(ids, starts, todo)
            try:
                with self.runner.translate_rank_errors():
                    self._prefill(seqs, on_logits, row_filter)
                    self._decode(seqs, ids, on_logits, row_filter)
            finally:
                for seq in seqs:
                    if seq.table_row >= 0:
                        self.scheduler.remove(seq)

    def record_module_outputs(
        self,
        ids: Seq[Seq[int]],
        pattern: str = "*",
        decode_from: int | None = None,
        *,
        before: PreHook | None = None,
    ) -> dict[str, list[Any]]:
        """Score ``ids`` and record the outputs of the modules whose names match ``pattern``.

        Args:
            ids: Token ids of each text.
            pattern: Glob of module names.
            decode_from: As for ``compute_logits``.
            before: Called for every module, as in ``ModelRunner.forward_hooks``.

        Returns:
            By module name, one output per step, on the CPU.
        """
        outputs: dict[str, list[Any]] = {}

        def record(name: str, _: tuple[Any, ...], output: Any) -> None:
            if fnmatch(name, pattern):
                outputs.setdefault(name, []).append(_copy_to_cpu(output))

        with self.runner.forward_hooks(before, record):
            self.run_sequences(ids, decode_from)
        return outputs

    def _start_sequences_that_fit(
        self, ids: Seq[Seq[int]], starts: Seq[int | None], todo: list[int]
    ) -> tuple[list[Sequence], list[int]]:
        """Start as many sequences as pages and rows last for; returns the rest too."""
        size = self.scheduler.limits.page_size
        tables = self.scheduler.tables
        available = self.scheduler.pool.num_available
        seqs: list[Sequence] = []
        for index in todo:
            need = -(-len(ids[index]) // size)
            if need > tables.table.shape[1] or not len(ids[index]):
                raise CapacityError(
                    "a sequence must have between 1 and "
                    f"{tables.table.shape[1] * size} tokens here, not {len(ids[index])}"
                )
            in_use = self.scheduler.limits.max_pages_in_use(len(ids[index]))
            if in_use > available or not tables.num_free_rows:
                break
            available -= in_use
            start = starts[index]
            prompt = tuple(ids[index] if start is None else ids[index][:start])
            seq = Sequence(
                Request(id="", prompt=prompt, params=SamplingParams()),
                index,
                -1,
                self.rope_length_source,
                max_length=1 << 62,
            )
            no_pages: list[list[int]] = [[] for _ in tables.tables]
            seq.attach_pages(no_pages, tables.alloc_row_with_pages(*no_pages))
            self.scheduler.add_running(seq)
            seqs.append(seq)
        if not seqs:
            raise CapacityError(
                f"{len(ids[todo[0]])} tokens need more KV pages than the {available} that are free"
            )
        return seqs, todo[len(seqs) :]

    def _prefill(
        self,
        seqs: list[Sequence],
        on_logits: LogitsCallback | None,
        row_filter: Callable[[int, int], bool] | None,
    ) -> None:
        max_rows = (
            max(_MAX_LOGIT_ELEMENTS // self.runner.sampler.vocab, 1)
            if on_logits is not None
            else self.max_tokens
        )
        while True:
            work: list[tuple[Sequence, int]] = []
            left = min(self.max_tokens, max_rows)
            for seq in seqs:
                count = min(seq.num_uncomputed, left)
                if count:
                    work.append((seq, count))
                    left -= count
            if not work:
                return
            self._run_step(work, on_logits, row_filter)

    def _decode(
        self,
        seqs: list[Sequence],
        ids: Seq[Seq[int]],
        on_logits: LogitsCallback | None,
        row_filter: Callable[[int, int], bool] | None,
    ) -> None:
        """Run the rest of each list, one token of each sequence per step."""
        while True:
            work = []
            for seq in seqs:
                if len(seq.tokens) < len(ids[seq.index]):
                    seq.tokens.append(ids[seq.index][len(seq.tokens)])
                    work.append((seq, 1))
            if not work:
                return
            for at in range(0, len(work), self.max_tokens):
                self._run_step(work[at : at + self.max_tokens], on_logits, row_filter)

    def _run_step(
        self,
        work: list[tuple[Sequence, int]],
        on_logits: LogitsCallback | None,
        row_filter: Callable[[int, int], bool] | None,
    ) -> None:
        runs: list[tuple[int, int, int, int]] = []
        picked: list[int] = []
        start = 0
        for seq, count in work:
            if on_logits is not None:
                for first, n in _contiguous_logit_runs(seq.index, seq.computed, count, row_filter):
                    runs.append((seq.index, first, len(picked), n))
                    at = start + first - seq.computed
                    picked.extend(range(at, at + n))
            start += count
        self.step_logit_rows = picked or [0]
        self.step_tokens = [
            (seq.index, seq.computed + i) for seq, count in work for i in range(count)
        ]
        for seq, count in work:
            self.scheduler.extend_pages(seq, count)
        batch = self.runner.packer.pack(
            Schedule(work).work, LogitRowSpec(picked or [0], [-1] * max(len(picked), 1))
        )
        logits = self.runner.forward_all_ranks(batch)
        for seq, count in work:
            seq.advance(count)
            self.scheduler.free_pages_outside_window(seq)
        if on_logits is not None:
            for index, first, at, n in runs:
                on_logits(index, first, logits[at : at + n])


def _contiguous_logit_runs(
    index: int, first: int, count: int, row_filter: Callable[[int, int], bool] | None
) -> list[tuple[int, int]]:
    """Runs (first, count) of consecutive positions whose logits are requested."""
    if row_filter is None:
        return [(first, count)]
    runs: list[tuple[int, int]] = []
    for position in range(first, first + count):
        if not row_filter(index, position):
            continue
        if runs and sum(runs[-1]) == position:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((position, 1))
    return runs


def _copy_to_cpu(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.detach().to("cpu", copy=True)
    if isinstance(output, tuple):
        return tuple(_copy_to_cpu(o) for o in output)
    return output
