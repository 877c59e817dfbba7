"""What rounding did to an engine's layers, told while the reference walks through them: their weights are read once.

Three things want a layer's weights of the checkpoint: the comparison with what the engine holds, what rounding cost its
outputs, and the checkpoint's own residual streams, which an engine of few bits is told against.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from modelmill.accept.cost import layer_cost
from modelmill.accept.finding import Finding
from modelmill.accept.own import Scales, held_weights, own_reference, own_weights, weight_rows
from modelmill.accept.reference import LayerWeights, Reference


class Rounding:
    """Of one engine whose layers are rounded, against ``true``, the reference with the checkpoint's weights.

    own: the engine is judged in two halves (accept.own). folded: a recipe's scales by layer. findings: what is held
    against what the checkpoint holds. cost: what ``accept.cost`` tells, where it is asked for. streams: the
    checkpoint's residual streams [T, H]; out of the last layer in the end.
    """

    def __init__(
        self,
        true: Reference,
        model: Any,
        kinds: Mapping[str, str],
        dtype: str,
        sequences: Sequence[tuple[Sequence[int], int]],
        *,
        own: bool,
        folded: Mapping[int, Scales],
        told: bool,
    ) -> None:
        """sequences: (ids, length of the prompt). told: whether the engine tells itself what rounding cost."""
        self.true, self.model, self.kinds, self.dtype = true, model, kinds, dtype
        self._own, self._told = own, told
        self._folded = {layer: _at(scales, true.device) for layer, scales in folded.items()}
        # an engine judged in one half is told against the reference that judges it
        followed = sequences if own else [] if told else sequences[:1]
        self.streams = [true.embed(torch.tensor(list(ids))) for ids, _ in followed]
        self._prompts = [prompt for _, prompt in followed]
        self.findings: list[Finding] = []
        self.cost: list[dict[str, Any]] = []
        self._done = 0

    def reference(self) -> Reference:
        """The one to judge with: a layer is compared when its weights are read, and in two halves the engine's own
        weights are what it computes with."""
        made = own_reference(self.true, self.model, self.kinds) if self._own else copy.copy(self.true)
        made.layer_weights = self._read  # type: ignore[method-assign]
        return made

    def rest(self) -> None:
        """The layers that nobody has read."""
        for index in range(self._done, self.true.num_layers):
            self._read(index)

    def _read(self, index: int) -> LayerWeights:
        plain = self.true.layer_weights(index)
        held = dict(held_weights(self.model, index, plain))
        if index == self._done:
            self._done += 1
            self._compare(index, plain, held)
            self._travel(index, plain, held)
        return own_weights(plain, held) if self._own else plain

    def _compare(self, index: int, plain: LayerWeights, held: LayerWeights) -> None:
        scales = self._folded.get(index, {})
        for path, module, row, bound in weight_rows(plain, held, self.kinds, self.dtype, scales, index, self.model.kv):
            self.findings.append(Finding(path, index, module, row, bound))

    def _travel(self, index: int, plain: LayerWeights, held: LayerWeights) -> None:
        for number, prompt in enumerate(self._prompts):
            trace = self.true.run_layer(index, plain, self.streams[number], prompt)
            if number == 0 and not self._told:
                self.cost += layer_cost(index, plain, held, trace, self.model, self.kinds)
            self.streams[number] = trace["output"].output


def _at(scales: Scales, device: torch.device) -> Scales:
    return {site: vector.to(device) for site, vector in scales.items()}
