"""Faults of Baichuan 2's head, whose rows have norm 1: refused, with the module named.

Rows that are normed twice are no fault, nor is an eps as small as those of norms: the values are
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from modelmill.builder import tensor_plan
from modelmill.checkpoint import rename
from modelmill.models import baichuan
from modelmill.nn.embedding_and_head import LMHead, TokenEmbedding
from modelmill.nn.step import Step
from tests.models.family_cases import changed
from tests.models.planted_fault import PlantedFault, config_fault, module_fault, refusal_test

FAMILY = "baichuan"
HEAD = ("head",)
Change = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def changed_rows(name: str, change: Change) -> Iterator[None]:
    """A matrix that is made in another way from the checkpoint's rows as they are stored."""
    real = rename.apply_rule

    def apply_rule(rule: Any, *args: Any) -> torch.Tensor:
        if rule.target != name:
            return real(rule, *args)
        rows = real(replace(rule, how="copy"), *args)
        return change(rows.float()).to(rows.dtype)

    with mock.patch.object(tensor_plan, "apply_rule", apply_rule):
        yield


def head(change: Change) -> PlantedFault:
    """The head's rows as stored, changed in another way."""
    return partial(changed_rows, "head.weight", change), HEAD, None


def divided(size: Change) -> PlantedFault:
    """The head divided by another size than that of its rows."""
    return head(lambda rows: rows / size(rows))


def norms(rows: torch.Tensor) -> torch.Tensor:
    return rows.norm(dim=1, keepdim=True)


def centred(rows: torch.Tensor) -> torch.Tensor:
    rows = rows - rows.mean(1, keepdim=True)
    return rows / norms(rows)


def some_rows(count: int) -> Change:
    """The first rows alone are normed."""
    return lambda rows: torch.cat((rows[:count] / norms(rows[:count]), rows[count:]))


def halves(rows: torch.Tensor) -> torch.Tensor:
    """Each half of the columns by itself, as on two ranks."""
    return torch.cat([part / norms(part) for part in rows.chunk(2, 1)], 1)


def states_of_norm_1(self: LMHead, x: torch.Tensor, step: Step) -> torch.Tensor:
    return real_head(self, x / norms(x.float()).to(x.dtype), step)


def logits_of_norm_1(self: LMHead, x: torch.Tensor, step: Step) -> torch.Tensor:
    logits = real_head(self, x, step)
    return logits / norms(logits)


def bounded_logits(self: LMHead, x: torch.Tensor, step: Step) -> torch.Tensor:
    """Cosines: divided by the norm of the state, too, and multiplied with a temperature."""
    return 10 * states_of_norm_1(self, x, step)


def normed_embedding(self: TokenEmbedding, ids: torch.Tensor, step: Step) -> torch.Tensor:
    x = real_embedding(self, ids, step)
    return x / norms(x.float()).to(x.dtype)


real_head, real_embedding = LMHead.forward, TokenEmbedding.forward
FAULTS: dict[str, PlantedFault] = {
    "as stored": config_fault(baichuan, changed(normed_head=False), HEAD, None),
    "columns normed": divided(lambda rows: rows.norm(dim=0, keepdim=True)),
    "the whole matrix normed": divided(lambda rows: rows.norm() / len(rows) ** 0.5),
    "sums of absolute values": divided(lambda rows: rows.abs().sum(1, keepdim=True)),
    "largest values": divided(lambda rows: rows.abs().amax(1, keepdim=True)),
    "root mean squares": divided(lambda rows: rows.square().mean(1, keepdim=True).sqrt()),
    "standard deviations": divided(lambda rows: rows.std(1, keepdim=True)),
    "squares of the norms": divided(lambda rows: norms(rows).square()),
    "roots of the norms": divided(lambda rows: norms(rows).sqrt()),
    "multiplied with the norms": head(lambda rows: rows * norms(rows)),
    "an eps beside the norms": divided(lambda rows: norms(rows) + 0.05),
    "norms of at least 1": divided(lambda rows: norms(rows).clamp(min=1.2)),
    "norms of the next rows": divided(lambda rows: norms(rows).roll(1, 0)),
    "the mean norm for all rows": divided(lambda rows: norms(rows).mean()),
    "rows less their mean": head(centred),
    "halves of rows by themselves": head(halves),
    "norm of the first half": divided(lambda rows: norms(rows[:, : rows.shape[1] // 2])),
    "the first rows alone": head(some_rows(64)),
    "all rows but the last": head(some_rows(119)),
    "states normed, too": module_fault(LMHead, states_of_norm_1, HEAD, None),
    "logits normed": module_fault(LMHead, logits_of_norm_1, HEAD, None),
    "cosines": module_fault(LMHead, bounded_logits, HEAD, None),
    "embeddings normed, too": module_fault(TokenEmbedding, normed_embedding, "embed", None),
}  # fmt: skip


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)
