"""Slots of recurrent state: one for each running sequence, and snapshots in the prefix cache.

A running sequence's slot has the number of its row in the page tables. A *snapshot* is a copy of a
state behind a full page, in a slot of its own; it is found by the key of that page, the same as in
``kv_pages``. A sequence whose prefix is cached starts from a copy of the latest snapshot, bit for
bit what the state was. Where the pages reach further than the snapshots, they are computed again,
and a snapshot is kept where they end: a third request finds it.

A state is as large as many pages, so each sequence keeps two snapshots: at the last full page in
front of its prompt's last token, and at its latest full page, which replaces the one before.
Snapshots without a use are evicted, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as Seq

from modelmill.runtime.sequence import Sequence, Snapshot


class StateSnapshotCache:
    """The slots behind those of running sequences, by page key.

    Attributes:
        padding: The slot of padding rows, and of snapshots that are not kept.
        restored: Sequences that started from a snapshot.
    """

    def __init__(self, sequences: int, snapshots: int, page_size: int) -> None:
        """Start with no snapshot in ``snapshots`` slots behind those of ``sequences``."""
        self.padding = sequences + snapshots
        self.count = snapshots
        self.restored = 0
        self._page_size = page_size
        self._free = list(range(self.padding - 1, sequences - 1, -1))
        self._slot_by_key: OrderedDict[bytes, int] = OrderedDict()
        self._copies: list[tuple[int, int]] = []

    @property
    def num_cached(self) -> int:
        """Snapshots in the prefix cache."""
        return len(self._slot_by_key)

    def num_pages_before_snapshot(self, keys: Seq[bytes]) -> int:
        """How many of the pages with these keys lie in front of the latest snapshot."""
        for count in range(len(keys), 0, -1):
            if keys[count - 1] in self._slot_by_key:
                return count
        return 0

    def queue_snapshot_restore(self, key: bytes, row: int) -> None:
        """Copy the snapshot with this key to a sequence's slot, before the next step."""
        self._slot_by_key.move_to_end(key)
        self._copies.append((self._slot_by_key[key], row))
        self.restored += 1

    def queue_state_copy(self, source: int, target: int) -> None:
        """Copy one sequence's state to another's slot, before the next step."""
        self._copies.append((source, target))

    def drop_state_copies_into(self, row: int) -> None:
        """Forget copies into the slot of a sequence that stops."""
        self._copies = [pair for pair in self._copies if pair[1] != row]

    def pop_copies(self) -> list[tuple[int, int]]:
        """The copies (from, to) to make before the next step, in order."""
        copies, self._copies = self._copies, []
        return copies

    def clip_to_page_boundary(self, seq: Sequence, count: int, most: int) -> int:
        """How many of the ``count`` next tokens of a sequence a step takes.

        Parts of a prompt end at full pages: then the states behind the pages do not depend on how
        the prompt was divided.

        Args:
            seq: A sequence that is to compute ``count`` tokens.
            count: Tokens, as many as the step's budget allows.
            most: Tokens that the step can take, beyond the budget for its latency.
        """
        first, end, size = seq.computed, seq.computed + count, self._page_size
        if first < seq.branch_end < end:
            return seq.branch_end - first
        if count == seq.num_uncomputed or end % size == 0:
            return count
        if end // size * size > first:
            return end // size * size - first
        whole = min((first // size + 1) * size - first, seq.num_uncomputed)
        return whole if whole <= most else 0

    def plan_snapshot(self, seq: Sequence, count: int) -> None:
        """Choose where the next step, of ``count`` tokens of a sequence, keeps a snapshot."""
        size = self._page_size
        first, end = seq.computed, seq.computed + count
        if seq.beam_search is not None:
            return
        # one token of a prompt is always computed, for its logits
        last = end if end > seq.prompt_len else min(end, seq.prompt_len - 1)
        at = last // size * size
        if at < first or at <= seq.snapshot_end or at == 0:
            return
        if (
            end < seq.prompt_len - 1
            and at != seq.branch_end
            and not self._keeps_intermediate_snapshot(seq, end)
        ):
            return
        slot = self._alloc_snapshot_slot()
        if slot is not None:
            seq.add_planned_snapshot(Snapshot(at, slot))

    def _keeps_intermediate_snapshot(self, seq: Sequence, end: int) -> bool:
        """Whether a snapshot between two parts of a prompt is kept: where slots are free.

        A long prompt that is preempted then starts from its latest part.
        """
        return bool(self._free) and end < seq.prompt_len

    def snapshot_slot(self, key: bytes) -> int | None:
        """The slot of the snapshot with this key; None if there is none."""
        return self._slot_by_key.get(key)

    def insert_snapshot_slot(self, key: bytes) -> int | None:
        """Put a snapshot into the cache that the caller writes at once.

        Returns:
            Its slot; None if all slots are in use, or are to be copied before the next step.
        """
        slot = self._alloc_snapshot_slot({source for source, _ in self._copies})
        if slot is not None:
            self._slot_by_key[key] = slot
        return slot

    def drop_all_snapshots(self) -> None:
        """Drop all snapshots, while no sequence runs."""
        self._free += self._slot_by_key.values()
        self._slot_by_key.clear()
        self._copies.clear()

    def _alloc_snapshot_slot(self, kept: Collection[int] = ()) -> int | None:
        """A slot for a snapshot, of the oldest one if need be; None if all are written or kept."""
        if self._free:
            return self._free.pop()
        oldest = next((key for key, slot in self._slot_by_key.items() if slot not in kept), None)
        return None if oldest is None else self._slot_by_key.pop(oldest)

    def cache_snapshots(self, seq: Sequence, known: int) -> None:
        """Put the snapshots behind the first ``known`` tokens of a sequence into the cache."""
        for snapshot in seq.pop_snapshots(known):
            key = seq.page_key(snapshot.end // self._page_size - 1, self._page_size)
            if key in self._slot_by_key:
                self._slot_by_key.move_to_end(key)
                self._free.append(snapshot.slot)
            else:
                self._slot_by_key[key] = snapshot.slot
            self._drop_replaced_snapshot(seq, snapshot.end, key)

    def _drop_replaced_snapshot(self, seq: Sequence, end: int, key: bytes) -> None:
        """Drop the snapshot that a later one of the same sequence replaces."""
        replaced = seq.replaceable_snapshot_key
        if replaced is not None and replaced in self._slot_by_key:
            self._free.append(self._slot_by_key.pop(replaced))
        prompt_end = (seq.prompt_len - 1) // self._page_size * self._page_size
        seq.set_replaceable_snapshot_key(None if end in (prompt_end, seq.branch_end) else key)

    def free_planned_slots(self, seq: Sequence) -> None:
        """Free the slots that a sequence, which stops, was to write."""
        self._free += [snapshot.slot for snapshot in seq.pop_snapshots(None)]
        self.drop_state_copies_into(seq.table_row)
