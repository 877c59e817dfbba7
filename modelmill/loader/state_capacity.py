"""How many sequences' recurrent states fit, and how many snapshots of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from modelmill.core import log
from modelmill.core.byte_size import format_bytes
from modelmill.core.config import RunConfig
from modelmill.core.errors import CapacityError
from modelmill.nn.recurrent_state import ModelStateSpec
from modelmill.parallel.tp_group import TPGroup

STATE_MEMORY_FRACTION = 0.5  # of the memory that states and KV pages share
MAX_SNAPSHOTS_PER_SEQUENCE = 4
_log = log.get_logger(__name__)


@dataclass(frozen=True)
class StateCapacity:
    """Slots of recurrent state.

    Attributes:
        sequences: Sequences that can run at once.
        snapshots: Copies that the prefix cache keeps.
        slot_bytes: Bytes of a slot on this rank.
    """

    sequences: int
    snapshots: int
    slot_bytes: int

    @property
    def num_slots(self) -> int:
        """All slots, with the last one, which is padding."""
        return self.sequences + self.snapshots + 1

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes


def state_capacity(
    shape: ModelStateSpec,
    dtype: torch.dtype,
    config: RunConfig,
    free_bytes: int,
    tp_group: TPGroup,
) -> StateCapacity | None:
    """Slots for ``config.state_cache_bytes``, or for a share of the free memory.

    All ranks get the smallest number of any rank, since they share slot numbers.

    Args:
        shape: Of a rank's state of one sequence.
        dtype: Of the activations.
        config: Run options.
        free_bytes: Memory for states and KV pages.
        tp_group: This rank's group.

    Returns:
        None for a model without recurrent state.

    Raises:
        CapacityError: Not even one sequence's state fits.
    """
    if not shape:
        return None
    size = shape.slot_bytes(dtype)
    budget = config.state_cache_bytes
    if budget is None:
        budget = int(free_bytes * STATE_MEMORY_FRACTION)
        if config.kv_cache_bytes is not None:
            budget = min(budget, free_bytes - config.kv_cache_bytes)
    count = tp_group.all_reduce_min(max(budget, 0) // size) - 1
    if count < 1:
        source = (
            "free memory gives"
            if config.state_cache_bytes is None
            else ("--state-cache-bytes gives")
        )
        raise CapacityError(
            f"the recurrent state of one sequence needs {format_bytes(2 * size)} with its padding, "
            f"{source} {format_bytes(max(budget, 0))}; raise --state-cache-bytes"
        )
    snapshots = 0
    if config.enable_prefix_caching:
        # half of the slots at most, until every sequence has one
        snapshots = max(count - config.max_num_seqs, count // 2)
    sequences = min(count - snapshots, config.max_num_seqs)
    snapshots = min(snapshots, MAX_SNAPSHOTS_PER_SEQUENCE * sequences)
    if sequences < config.max_num_seqs:
        _log.info(
            "recurrent state: %s for each sequence, so that %d run at once, not %d "
            "(--state-cache-bytes, --max-num-seqs)",
            format_bytes(size),
            sequences,
            config.max_num_seqs,
        )
    return StateCapacity(sequences, snapshots, size)
