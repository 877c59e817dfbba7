"""Compares the embeddings of whole sequences' steps, and those of the last learned positions.

The check of modules runs one prompt alone. A row that is wrong in a batch, in a later part of a
prompt, or for a decoded token would show in the logits only, and no module would be named. One of a
position behind the sequences, which are short, would not show at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from modelmill.accept.error_metrics import compare_tensors
from modelmill.accept.reference import ReferenceModel
from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.accept.tolerance_check_result import ToleranceCheckResult
from modelmill.accept.tolerances import module_bound

EMBED_MODULE = "embed"


class StepEmbeddingsCheck:
    """The engine's embeddings of some sequences, step by step, beside the reference's.

    With learned positions also those of the last tokens of a sequence of ``longest`` tokens.
    """

    def __init__(
        self, reference: ReferenceModel, ids: Sequence[Sequence[int]], longest: int
    ) -> None:
        self._reference, self._longest = reference, longest
        self._has_positions = "positions" in reference.embedding_table_names()
        self._expected = [
            reference.bind_to_sequence(each).embed(torch.tensor(list(each))) for each in ids
        ]
        self._pairs: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def recorded(self, scorer: TeacherForcedScorer) -> Iterator[None]:
        """Within the block, record the embeddings of the scorer's steps."""

        def record(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            rows = [self._expected[index][position] for index, position in scorer.step_tokens]
            # a copy: fused layers add to the stream in place
            ours = output[: len(rows)].to("cpu", torch.float32, copy=True)
            self._pairs.append((ours, torch.stack(rows).cpu()))
            if self._has_positions:
                self._has_positions = False  # once
                self._record_last_position_embeddings(module, *args)

        handle = scorer.runner.model.get_submodule(EMBED_MODULE).register_forward_hook(record)
        try:
            yield
        finally:
            handle.remove()

    def _record_last_position_embeddings(self, module: nn.Module, ids: Tensor, step: Any) -> None:
        """Embed the step's tokens as the last ones of the longest sequence."""
        count = min(len(ids), self._longest)
        last = torch.arange(self._longest - count, self._longest, device=ids.device)
        ours = module.forward(ids[:count], replace(step, positions=last))
        whole = torch.zeros(self._longest, dtype=torch.long)
        whole[-count:] = ids[:count].cpu()
        try:
            right = self._reference.embed(whole)[-count:].cpu()
        except IndexError:  # the engine takes longer sequences than the checkpoint has positions
            right = torch.full(ours.shape, torch.nan)
        self._pairs.append((ours.float().cpu(), right))

    def findings(self, dtype: str) -> list[ToleranceCheckResult]:
        """Compare what was recorded; empty if nothing was."""
        if not self._pairs:
            return []
        ours, expected = (torch.cat(each) for each in zip(*self._pairs, strict=True))
        metrics = compare_tensors(f"{EMBED_MODULE} of steps", ours, expected)
        bound = module_bound("embedding", dtype)
        return [ToleranceCheckResult(metrics.name, None, EMBED_MODULE, metrics, bound)]
