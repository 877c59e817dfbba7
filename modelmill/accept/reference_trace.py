"""The reference's inputs and outputs of each module, layer by layer, during the engine's pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelmill.accept.reference import HeadTrace, LayerTrace, ReferenceModel


@dataclass
class OtherSequence:
    """A sequence that is only computed along: its residual stream [T, H] and prompt length."""

    stream: torch.Tensor
    prompt_length: int


class ReferenceTrace:
    """Runs the reference layer by layer as the engine's forward reaches it.

    One layer's weights and trace are in memory.
    """

    def __init__(
        self,
        reference: ReferenceModel,
        x: torch.Tensor,
        rows: Sequence[int],
        others: Sequence[OtherSequence] = (),
    ) -> None:
        self.reference = reference
        self.stream = x
        self.streams = [x]
        self.layer_trace: LayerTrace | None = None
        self._rows = list(rows)
        self._others = others
        self._head_trace: HeadTrace | None = None

    def enter_layer(self, layer: int) -> None:
        """Advance to a layer: the stream becomes the previous layer's output."""
        self.finish_layer()
        weights = self.reference.layer_weights(layer)
        self.layer_trace = self.reference.run_layer(layer, weights, self.stream, len(self.stream))
        for other in self._others:
            other.stream = self.reference.run_layer(
                layer, weights, other.stream, other.prompt_length
            )["output"].output

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


# engine module → the reference's names for its output, in the order in which they are concatenated
MODULE_OUTPUTS = {
    "attn.qkv_proj": ("q", "k", "v"),
    "attn.core": ("attn",),
    "attn.o_proj": ("o_proj",),
    "mlp.gate_up_proj": ("gate", "up"),
    "mlp.fc_proj": ("fc",),
    "mlp.act": ("act",),
    "mlp.down_proj": ("down",),
}


def reference_input(module_path: str, trace: LayerTrace) -> torch.Tensor | None:
    """Return the input of the reference's module."""
    if module_path == "attn.qkv_proj":
        return trace["input_norm"].output
    if module_path == "attn.rope_cache":
        return torch.cat([trace[n].output for n in ("q", "k", "v")], -1)
    if module_path == "attn.core":
        return trace["q_rot"].output if "q_rot" in trace else trace["q"].output
    if module_path == "attn.o_proj":
        return trace["attn"].output
    if module_path in ("mlp.gate_up_proj", "mlp.fc_proj"):
        return trace["mlp_norm"].output
    if module_path == "mlp.act":
        return torch.cat([trace[n].output for n in ("gate", "up", "fc") if n in trace], -1)
    return trace["act"].output if module_path == "mlp.down_proj" else None


def split_output(output: torch.Tensor, expected: list[torch.Tensor]) -> list[torch.Tensor]:
    """Split a fused module's output into the reference's parts, each [T, width]."""
    flat = output.reshape(output.shape[0], -1)
    widths = [e.shape[-1] for e in expected]
    # a fused output of another width cannot be split: return it whole, and the comparison fails by
    # shape
    return list(flat.split(widths, -1)) if sum(widths) == flat.shape[-1] else [flat] * len(expected)


def norm_args_for_stream(stream: torch.Tensor, args: tuple[Any, ...]) -> tuple[Any, ...]:
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
