"""Compare an engine's next-token distributions with a reference's: perplexity, KL, agreement.

The text is cut into windows that are read one by one, each from its beginning. The reference's
logits are computed once and kept beside the engines, since many engines are compared with one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.core.progress_callback import Progress

ROWS_PER_STEP = 64
"""Rows whose float64 distributions are in memory at a time."""


class FidelitySums:
    """Running sums over rows: negative log-likelihood, KL to the reference, equal next tokens."""

    def __init__(self) -> None:
        self.scored = self.rows = self.num_equal = 0
        self.nats = self.kl = self.max_kl = 0.0

    def add(
        self, logits: torch.Tensor, reference: torch.Tensor | None, targets: torch.Tensor
    ) -> None:
        """logits, reference: [R, V]; targets: [R] the tokens that came, −1 where none did.

        All on one device.
        """
        for at in range(0, len(logits), ROWS_PER_STEP):
            part = slice(at, at + ROWS_PER_STEP)
            log_probs, came = logits[part].double().log_softmax(-1), targets[part]
            known = came >= 0
            self.scored += int(known.sum())
            self.nats -= float(log_probs[known].gather(-1, came[known, None]).sum())
            if reference is None:
                continue
            exact = reference[part].double().log_softmax(-1)
            each = (exact.exp() * (exact - log_probs)).sum(-1).clamp(min=0)
            self.rows += len(each)
            self.kl += float(each.sum())
            self.max_kl = max(self.max_kl, float(each.max()))
            self.num_equal += int((log_probs.argmax(-1) == exact.argmax(-1)).sum())

    def facts(self) -> dict[str, Any]:
        """perplexity, and what was compared with a reference."""
        fields: dict[str, Any] = {"perplexity": math.exp(self.nats / self.scored)}
        if self.rows:
            fields |= {
                "mean_kl": self.kl / self.rows,
                "max_kl": self.max_kl,
                "agreement": self.num_equal / self.rows,
            }
        return fields


def split_windows(ids: Sequence[int], length: int) -> list[list[int]]:
    """Split ids into windows of ``length`` without overlap; a last window of one id is dropped."""
    cuts = [list(ids[at : at + length]) for at in range(0, len(ids), length)]
    return [cut for cut in cuts if len(cut) > 1]


def measure_fidelity(
    engine_core: Any,
    windows: Sequence[Sequence[int]],
    reference: torch.Tensor | None,
    on_progress: Progress,
) -> dict[str, Any]:
    """The loop's engine on the windows.

    reference: [all rows, V] float32 in the windows' order, on the CPU.
    """
    sums, first = FidelitySums(), 0
    for number, window in enumerate(windows):
        targets = torch.tensor([*window[1:], -1])

        def take(
            _: int,
            at: int,
            logits: torch.Tensor,
            start: int = first,
            targets: torch.Tensor = targets,
        ) -> None:
            to = slice(at, at + len(logits))
            expected = (
                None
                if reference is None
                else reference[start + to.start : start + to.stop].to(logits.device)
            )
            sums.add(logits.float(), expected, targets[to].to(logits.device))

        TeacherForcedScorer(engine_core).run_sequences([window], None, take)
        first += len(window)
        on_progress("windows", number + 1, len(windows))
    return sums.facts()


def cached_logits(
    open_engine_core: Callable[[], Any],
    windows: Sequence[Sequence[int]],
    file: Path,
    on_progress: Progress,
) -> torch.Tensor:
    """Return the float32 logits [all rows, V] of an engine on the windows, cached in ``file``.

    open_engine_core: called only where they must be computed. The file's name is completed by a
    digest of the windows.
    """
    digest = hashlib.sha256(repr([list(w) for w in windows]).encode()).hexdigest()[:12]
    rows = sum(map(len, windows))
    done = file.with_name(f"{file.name}-{digest}.f32")
    if not done.exists():
        loop = open_engine_core()
        vocab = loop.model_runner.sampler.vocab
        part = done.with_suffix(".part")
        logits_file = torch.from_file(
            str(part), shared=True, size=rows * vocab, dtype=torch.float32
        ).view(rows, vocab)
        first = 0
        for number, window in enumerate(windows):

            def take(_: int, at: int, logits: torch.Tensor, start: int = first) -> None:
                logits_file[start + at : start + at + len(logits)] = logits.float().cpu()

            TeacherForcedScorer(loop).run_sequences([window], None, take)
            first += len(window)
            on_progress("windows", number + 1, len(windows))
        del logits_file
        part.rename(done)
    size = done.stat().st_size // 4
    return torch.from_file(str(done), shared=True, size=size, dtype=torch.float32).view(
        rows, size // rows
    )
