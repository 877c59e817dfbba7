"""The reference's side of a pass through the engine's modules: what each of them reads, and what it
should put out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelmill.accept.reference import HeadTrace, LayerTrace, ReferenceModel


@dataclass
class OtherSequence:
    """A sequence that only travels along: its residual stream [T, H] and the length of its
    prompt.
    """

    stream: torch.Tensor
    prompt_length: int


class ReferenceTrace:
    """The reference, layer by layer, as the engine's forward reaches it; one layer's weights and
    trace in memory.
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
        """Go on to a layer: the stream becomes the previous one's output."""
        self.finish_layer()
        weights = self.reference.layer_weights(layer)
        self.layer_trace = self.reference.run_layer(layer, weights, self.stream, len(self.stream))
        for other in self._others:
            other.stream = self.reference.run_layer(
                layer, weights, other.stream, other.prompt_length
            )["output"].output

    def finish_layer(self) -> None:
        """The layer is done: its output is the stream that the next one reads."""
        if self.layer_trace is not None and self.stream is not self.layer_trace["output"].output:
            self.stream = self.layer_trace["output"].output
            self.streams.append(self.stream)

    def head_trace(self) -> HeadTrace:
        """Final norm and logits of the rows that are judged."""
        if self._head_trace is None:
            self._head_trace = self.reference.head(self.stream[self._rows])
        return self._head_trace


# engine module → the reference's names for its output, in the order they lie side by side
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
    """What the reference's module read."""
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
    """A fused module's output cut into what the reference has side by side, each [T, width]."""
    flat = output.reshape(output.shape[0], -1)
    widths = [e.shape[-1] for e in expected]
    # a fused output of another width than the reference's cannot be cut: compare as it is and fail
    # by shape
    return list(flat.split(widths, -1)) if sum(widths) == flat.shape[-1] else [flat] * len(expected)


def norm_args_for_stream(stream: torch.Tensor, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """(x, residual, …) of a norm so that their sum is exactly ``stream`` in the engine's dtype."""
    x, residual = args[0], args[1]
    given = cast_like(stream, x)
    if residual is None:
        return given, None, *args[2:]
    return torch.zeros_like(given), given, *args[2:]


def cast_like(value: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
    """``value`` as the engine would hold it: dtype, device and layout of ``template``."""
    return (
        value.to(device=template.device, dtype=template.dtype)
        .reshape(value.shape[0], *template.shape[1:])
        .contiguous()
        .clone()
    )


def split_layer_path(name: str) -> tuple[int | None, str]:
    """("layers.3.attn.o_proj") → (3, "attn.o_proj")."""
    parts = name.split(".", 2)
    if parts[0] == "layers" and len(parts) == 3:
        return int(parts[1]), parts[2]
    return None, name
