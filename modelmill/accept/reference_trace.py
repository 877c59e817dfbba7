"""The reference's inputs and outputs of each module, layer by layer, during the engine's pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelmill.accept.reference import HeadTrace, LayerTrace, LayerWeights, ReferenceModel
from modelmill.nn.layer_spec import LayerSpec, NormSpec

ROUTING_MODULE = "routing"
"""The reference's output that chooses the experts of each token."""


@dataclass
class ReferenceSequence:
    """A sequence that is only computed along.

    Attributes:
        reference: the reference of this sequence.
        stream: its residual stream [T, H].
        prompt_length: of the sequence.
    """

    reference: ReferenceModel
    stream: torch.Tensor
    prompt_length: int

    @staticmethod
    def from_ids(
        reference: ReferenceModel, ids: Sequence[int], prompt_length: int
    ) -> ReferenceSequence:
        """The sequence of some token ids, embedded."""
        own = reference.bind_to_sequence(ids)
        return ReferenceSequence(own, own.embed(torch.tensor(list(ids))), prompt_length)

    def run_layer(self, index: int, weights: LayerWeights) -> LayerTrace:
        """Run a layer with weights read before; the stream becomes its output."""
        trace = self.reference.run_layer(index, weights, self.stream, self.prompt_length)
        self.stream = trace["output"].output
        return trace


class ReferenceLayerStepper:
    """Runs the reference layer by layer as the engine's forward reaches it.

    One layer's weights and trace are in memory.

    Attributes:
        routings: Of layers with experts, by number, the weights [T, E] of each sequence.
    """

    def __init__(
        self,
        reference: ReferenceModel,
        x: torch.Tensor,
        rows: Sequence[int],
        others: Sequence[ReferenceSequence] = (),
    ) -> None:
        self.reference = reference
        self.stream = x
        self.streams = [x]
        self.layer_trace: LayerTrace | None = None
        self.routings: dict[int, list[torch.Tensor]] = {}
        self._rows = list(rows)
        self._others = others
        self._head_trace: HeadTrace | None = None

    def advance_to_layer(self, layer: int) -> None:
        """Advance to a layer: the stream becomes the previous layer's output."""
        self.finish_layer()
        weights = self.reference.layer_weights(layer)
        self.layer_trace = self.reference.run_layer(layer, weights, self.stream, len(self.stream))
        traces = [self.layer_trace]
        traces += [other.run_layer(layer, weights) for other in self._others]
        if ROUTING_MODULE in self.layer_trace:
            self.routings[layer] = [trace[ROUTING_MODULE].output for trace in traces]

    def finish_layer(self) -> None:
        """Finish the layer: its output is the stream that the next one reads."""
        if self.layer_trace is not None and self.stream is not self.layer_trace["output"].output:
            self.stream = self.layer_trace["output"].output
            self.streams.append(self.stream)

    def head_trace(self) -> HeadTrace:
        """Return final norm and logits of the checked rows."""
        if self._head_trace is None:
            self._head_trace = self.reference.head(self.stream[self._rows])
        return self._head_trace


def concat_reference_outputs(trace: LayerTrace, names: Sequence[str]) -> torch.Tensor:
    """Return the concatenation of the reference's outputs.

    Raises:
        ValueError: if the reference records no such output.
    """
    missing = [name for name in names if name not in trace]
    if missing:
        raise ValueError(
            f"the reference records no output {', '.join(missing)} (it has {', '.join(trace)}); "
            "correct the names in the layer's spec"
        )
    outputs = [trace[name].output for name in names]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def lookup_reference_value(
    spec: LayerSpec, value: str, trace: LayerTrace, stream: torch.Tensor
) -> torch.Tensor | None:
    """Return the reference's tensor of a value of a layer; None for a value that it has not.

    stream: the residual stream that enters the layer.
    """
    writer = spec.writer_by_value.get(value)
    if writer is None:
        return None
    if value == writer.writes[0]:
        return concat_reference_outputs(trace, writer.reference) if writer.reference else None
    if not isinstance(writer, NormSpec):
        return None
    name = writer.stream_reference
    return concat_reference_outputs(trace, (name,)) if name else stream


def split_fused_output(output: torch.Tensor, expected: list[torch.Tensor]) -> list[torch.Tensor]:
    """Split a fused module's output into the reference's parts, each [T, width]."""
    flat = output.reshape(output.shape[0], -1)
    widths = [e.shape[-1] for e in expected]
    # a fused output of another width cannot be split: return it whole, and the comparison fails by
    # shape
    return list(flat.split(widths, -1)) if sum(widths) == flat.shape[-1] else [flat] * len(expected)


def norm_args_summing_to(stream: torch.Tensor, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a norm's (x, residual, …) whose sum is exactly ``stream`` in the engine's dtype."""
    x, residual = args[0], args[1]
    stream_cast = cast_like(stream, x)
    if residual is None:
        return stream_cast, None, *args[2:]
    return torch.zeros_like(stream_cast), stream_cast, *args[2:]


def cast_like(value: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
    """Cast ``value`` to dtype, device and layout of ``template``."""
    return (
        value.to(device=template.device, dtype=template.dtype)
        .reshape(value.shape[0], *template.shape[1:])
        .contiguous()
        .clone()
    )


def split_layer_path(name: str) -> tuple[int | None, str]:
    """Split a path: "layers.3.attn.o_proj" → (3, "attn.o_proj")."""
    parts = name.split(".", 2)
    if parts[0] == "layers" and len(parts) == 3:
        return int(parts[1]), parts[2]
    return None, name
