"""Weights that torch's references expand in every step, expanded once: on a CPU where no compiled kernel serves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from modelmill.core import log, ram
from modelmill.core.size import byte_text
from modelmill.nn.linear import Linear
from modelmill.ops.cpu import build as kernels
from modelmill.ops.shelf import Ops
from modelmill.parallel.mesh import ALONE, Mesh
from modelmill.weights.held import EXPANDED_SHARE, Expanded, HeldWeight, expansion_of
from modelmill.weights.stacked import Held as Stacked

_log = log.get(__name__)


@dataclass(frozen=True)
class Expansions:
    """weights, bytes: those that are expanded now; packed, packed_bytes: those for which there is no room."""

    weights: int = 0
    bytes: int = 0
    packed: int = 0
    packed_bytes: int = 0

    @property
    def note(self) -> str | None:
        """One line for people about what stays packed."""
        if not self.packed:
            return None
        missing = byte_text(self.packed_bytes)
        return (
            f"{self.packed} of {self.packed + self.weights} weights are unpacked anew in every step, which is slow: "
            f"keeping them unpacked needs {missing} more memory"
        )


def prepare_weights(model: nn.Module, ops: Ops, dtype: torch.dtype, device: str, mesh: Mesh = ALONE) -> None:
    """Expand what would be expanded in every step, and say in the log what makes a CPU slow.

    dtype: of activations. mesh: its ranks share this machine's memory, and the first one speaks for all.
    """
    if device != "cpu":
        return
    done = expand(model, ops, dtype, int(ram.memory().free * EXPANDED_SHARE) // mesh.size)
    if mesh.rank:
        return
    for line in (slow_reason(ops), done.note):
        if line is not None:
            _log.warning("%s", line)


def slow_reason(ops: Ops) -> str | None:
    """One line where compiled kernels could serve this CPU and cannot be had, with the way out; None: all is well."""
    reason = kernels.available("cpu")
    if reason is None or ops.chosen["linear"] == "cpu":
        return None
    return f"no compiled CPU kernels, so that torch computes, several times slower: {reason}"


def expand(model: nn.Module, ops: Ops, dtype: torch.dtype, room: int) -> Expansions:
    """Expand the weights whose op torch's reference serves, in the order of the model, while ``room`` bytes last.

    A tied weight is expanded once. Products are the same to the bit.
    """
    work = _Work(ops, dtype, room)
    for linear in [m for m in model.modules() if isinstance(m, Linear)]:
        linear.held = work.expanded(linear.held)
    return work.done


class _Work:
    """One pass over a model's weights."""

    def __init__(self, ops: Ops, dtype: torch.dtype, room: int) -> None:
        self.ops, self.dtype, self.room = ops, dtype, room
        self.done = Expansions()
        self._made: dict[int, HeldWeight] = {}

    def expanded(self, weight: HeldWeight) -> HeldWeight:
        """The weight, expanded where its op needs that and there is room."""
        if isinstance(weight, Stacked):
            return Stacked(tuple(map(self.expanded, weight.parts)))
        how = expansion_of(weight)
        if how is None or self.ops.chosen.get(how.op) != "torch":
            return weight
        key = weight.tensors()["weight"].data_ptr()
        if key not in self._made:
            self._made[key] = self._fitted(weight, how.dtype or self.dtype)
        return self._made[key]

    def _fitted(self, weight: HeldWeight, wide: torch.dtype) -> HeldWeight:
        size = weight.shape[0] * weight.shape[1] * wide.itemsize
        if self.done.bytes + size > self.room:
            more = self.done.packed_bytes + size
            self.done = replace(self.done, packed=self.done.packed + 1, packed_bytes=more)
            return weight
        made = Expanded(weight, weight.expanded(self.dtype))  # type: ignore[attr-defined]
        taken = self.done.bytes + made.wide.weight.nbytes
        self.done = replace(self.done, weights=self.done.weights + 1, bytes=taken)
        return made
