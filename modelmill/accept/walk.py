"""The reference's side of a pass through the engine's modules: what each of them reads, and what it should put out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelmill.accept.reference import HeadTrace, LayerTrace, Reference


@dataclass
class Other:
    """A sequence that only travels along: its residual stream [T, H] and the length of its prompt."""

    stream: torch.Tensor
    prompt: int


class Walk:
    """The reference, layer by layer, as the engine's forward reaches it; one layer's weights and trace in memory."""

    def __init__(
        self, reference: Reference, x: torch.Tensor, rows: Sequence[int], others: Sequence[Other] = ()
    ) -> None:
        self.reference = reference
        self.stream = x
        self.streams = [x]
        self.trace: LayerTrace | None = None
        self._rows = list(rows)
        self._others = others
        self._head: HeadTrace | None = None

    def enter(self, layer: int) -> None:
        """Go on to a layer: the stream becomes the previous one's output."""
        self.leave()
        weights = self.reference.layer_weights(layer)
        self.trace = self.reference.run_layer(layer, weights, self.stream, len(self.stream))
        for other in self._others:
            other.stream = self.reference.run_layer(layer, weights, other.stream, other.prompt)["output"].output

    def leave(self) -> None:
        """The layer is done: its output is the stream that the next one reads."""
        if self.trace is not None and self.stream is not self.trace["output"].output:
            self.stream = self.trace["output"].output
            self.streams.append(self.stream)

    def final(self) -> HeadTrace:
        """Final norm and logits of the rows that are judged."""
        if self._head is None:
            self._head = self.reference.head(self.stream[self._rows])
        return self._head


# engine module → the reference's names for its output, in the order they lie side by side
OUTPUTS = {
    "attn.qkv_proj": ("q", "k", "v"),
    "attn.mix": ("attn",),
    "attn.o_proj": ("o_proj",),
    "mlp.gate_up_proj": ("gate", "up"),
    "mlp.fc_proj": ("fc",),
    "mlp.act": ("act",),
    "mlp.down_proj": ("down",),
}


def inputs(part: str, trace: LayerTrace) -> torch.Tensor | None:
    """What the reference's module read."""
    if part == "attn.qkv_proj":
        return trace["input_norm"].output
    if part == "attn.rotate":
        return torch.cat([trace[n].output for n in ("q", "k", "v")], -1)
    if part == "attn.mix":
        return trace["q_rot"].output if "q_rot" in trace else trace["q"].output
    if part == "attn.o_proj":
        return trace["attn"].output
    if part in ("mlp.gate_up_proj", "mlp.fc_proj"):
        return trace["mlp_norm"].output
    if part == "mlp.act":
        return torch.cat([trace[n].output for n in ("gate", "up", "fc") if n in trace], -1)
    return trace["act"].output if part == "mlp.down_proj" else None


def pieces(output: torch.Tensor, expected: list[torch.Tensor]) -> list[torch.Tensor]:
    """A fused module's output cut into what the reference has side by side, each [T, width]."""
    flat = output.reshape(output.shape[0], -1)
    widths = [e.shape[-1] for e in expected]
    # a fused output of another width than the reference's cannot be cut: compare as it is and fail by shape
    return list(flat.split(widths, -1)) if sum(widths) == flat.shape[-1] else [flat] * len(expected)


def stream_args(stream: torch.Tensor, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """(x, residual, …) of a norm so that their sum is exactly ``stream`` in the engine's dtype."""
    x, residual = args[0], args[1]
    given = like(stream, x)
    if residual is None:
        return given, None, *args[2:]
    return torch.zeros_like(given), given, *args[2:]


def like(value: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """``value`` as the engine would hold it: dtype, device and layout of ``model``."""
    return (
        value.to(device=model.device, dtype=model.dtype).reshape(value.shape[0], *model.shape[1:]).contiguous().clone()
    )


def split(name: str) -> tuple[int | None, str]:
    """("layers.3.attn.o_proj") → (3, "attn.o_proj")."""
    parts = name.split(".", 2)
    if parts[0] == "layers" and len(parts) == 3:
        return int(parts[1]), parts[2]
    return None, name
