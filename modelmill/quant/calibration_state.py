"""A decoder layer split at its four sites, and the calibration tokens on their way through it.

A site is an input that one or more matrices share: "qkv" (the norm before attention), "o" (the
attention output), "up" (the norm before the MLP; gate and up, or GPT-2's fc) and "down" (the
activation). Statistics of inputs are collected by site, and a recipe treats the matrices of a site
together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.kv import KVCache, KVShape
from modelmill.nn.linear import Linear
from modelmill.nn.step import Step

SITES = ("qkv", "o", "up", "down")
PAGE_SIZE = 16
ImageEmbeddings = Mapping[int, torch.Tensor]
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class AttentionHeads:
    """The division of qkv's rows and o's columns: q heads, kv heads, channels per head."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int


class QuantizableLayer:
    """One layer of a model, by site.

    ``layer`` has the modules that the layers of nn.decoder and GPT-2 have in common.
    """

    def __init__(self, layer: Any, heads: AttentionHeads) -> None:
        self.layer = layer
        self.heads = heads
        self.has_gated_mlp = hasattr(layer.mlp, "gate_up_proj")

    @property
    def linear_paths(self) -> dict[str, str]:
        """Return site → path of the linear module that reads it."""
        up = "mlp.gate_up_proj" if self.has_gated_mlp else "mlp.fc_proj"
        return {"qkv": "attn.qkv_proj", "o": "attn.o_proj", "up": up, "down": "mlp.down_proj"}

    def linear(self, site: str) -> Linear:
        """Return the module that reads a site."""
        module = self.layer.get_submodule(self.linear_paths[site])
        assert isinstance(module, Linear)
        return module

    def norm(self, site: str) -> nn.Module | None:
        """Return the norm whose output a site is; None for "o" and "down"."""
        return {"qkv": self.layer.attn_norm, "up": self.layer.mlp_norm}.get(site)


@dataclass
class CalibrationBatch:
    """Some calibration sequences between two layers or at a site; all tensors are [T, …]."""

    step: Step
    rope: RopeCosSin
    x: torch.Tensor
    residual: torch.Tensor | None = None
    site_input: torch.Tensor | None = None


class CalibrationState:
    """The calibration tokens on their way through the layers, in batches of whole sequences."""

    def __init__(self, batches: Sequence[CalibrationBatch]) -> None:
        self.batches = list(batches)

    @staticmethod
    def from_ids(
        model: Any,
        ids: Sequence[Sequence[int]],
        ops: Any,
        device: str,
        image_embeddings: Sequence[ImageEmbeddings] | None = None,
    ) -> CalibrationState:
        """Embed sequences of ids.

        Args:
            model: only its embedding is used.
            ids: one tensor per sequence.
            ops: the ops of the device.
            device: where to compute, in float32.
            image_embeddings: for each sequence the image embeddings [L, H] by their first position;
                the ids at these positions are set to −1.
        """
        batches: list[CalibrationBatch] = []
        begun = 0
        for group in _batch_sequences(ids):
            step = _prefill_step(model, group, ops, device)
            foreign = (
                [] if image_embeddings is None else image_embeddings[begun : begun + len(group)]
            )
            begun += len(group)
            with torch.inference_mode():
                rope = model.rope(step) if hasattr(model, "rope") else RopeCosSin()
                x = model.embed(step.ids, step)
                for first, places in zip(step.query_start.tolist(), foreign, strict=False):
                    for position, embeddings in places.items():
                        at = first + position
                        x[at : at + len(embeddings)] = embeddings.to(x.device, x.dtype)
                        step.ids[at : at + len(embeddings)] = -1
                batches.append(CalibrationBatch(step, rope, x))
        return CalibrationState(batches)

    def fork(self, batches: int | None = None) -> CalibrationState:
        """Copy the state of the first ``batches``; ops may add into a residual in place."""
        return CalibrationState(
            [
                replace(
                    batch,
                    x=batch.x.clone(),
                    residual=None if batch.residual is None else batch.residual.clone(),
                )
                for batch in self.batches[:batches]
            ]
        )

    def subset(self, max_tokens: int) -> CalibrationState:
        """Copy the first sequences, at least one, with about ``max_tokens`` tokens."""
        batch = self.batches[0]
        ends = batch.step.query_start.tolist()[1:]
        count = max(1, sum(end <= max_tokens for end in ends))
        end = ends[count - 1]
        step, rope = batch.step, batch.rope
        lengths = step.context_lens[:count]
        cut = replace(
            step,
            **{
                name: getattr(step, name)[:end]
                for name in ("ids", "positions", "slots", "rope_keys")
            },
            block_tables=step.block_tables[:count],
            query_start=step.query_start[: count + 1],
            context_lens=lengths,
            max_query=int(lengths.max()),
            max_context=int(lengths.max()),
        )
        turned = RopeCosSin(
            *(None if t is None else t[:end] for t in (rope.cos, rope.sin, rope.q_scale))
        )
        residual = None if batch.residual is None else batch.residual[:end].clone()
        return CalibrationState([CalibrationBatch(cut, turned, batch.x[:end].clone(), residual)])

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return sum(len(batch.x) for batch in self.batches)

    @torch.inference_mode()
    def forward_to(self, block: QuantizableLayer, site: str) -> None:
        """Compute from the site before (or the layer's input) up to this site."""
        for batch in self.batches:
            _FORWARD_TO[site](block.layer, batch)

    @torch.inference_mode()
    def finish_layer(self, block: QuantizableLayer) -> None:
        """Compute from the last site to the layer's output."""
        for batch in self.batches:
            batch.x = block.layer.mlp.down_proj(batch.site_input, batch.step)
            batch.site_input = None

    def forward_layer(self, block: QuantizableLayer) -> None:
        """Compute a whole layer."""
        for site in SITES:
            self.forward_to(block, site)
        self.finish_layer(block)

    def site_inputs(self) -> Iterator[torch.Tensor]:
        """Return the inputs at the current site by batch, [T, K] float32."""
        for batch in self.batches:
            assert batch.site_input is not None, "between two layers"
            yield batch.site_input.float()


def _forward_to_qkv(layer: Any, b: CalibrationBatch) -> None:
    b.site_input, b.residual = layer.attn_norm(b.x, b.residual, b.step)


def _forward_to_o(layer: Any, b: CalibrationBatch) -> None:
    attn = layer.attn
    q = attn.rope_cache(attn.qkv_proj(b.site_input, b.step), b.rope, b.step)
    b.site_input = attn.core(q, b.step)


def _forward_to_up(layer: Any, b: CalibrationBatch) -> None:
    b.site_input, b.residual = layer.mlp_norm(
        layer.attn.o_proj(b.site_input, b.step), b.residual, b.step
    )


def _forward_to_down(layer: Any, b: CalibrationBatch) -> None:
    mlp = layer.mlp
    first = mlp.gate_up_proj if hasattr(mlp, "gate_up_proj") else mlp.fc_proj
    b.site_input = mlp.act(first(b.site_input, b.step), b.step)


_FORWARD_TO = {
    "qkv": _forward_to_qkv,
    "o": _forward_to_o,
    "up": _forward_to_up,
    "down": _forward_to_down,
}


def _batch_sequences(ids: Sequence[Sequence[int]]) -> Iterator[list[list[int]]]:
    """Group sequences into batches of about BATCH_TOKENS."""
    group: list[list[int]] = []
    for one in ids:
        if group and sum(map(len, group)) + len(one) > BATCH_TOKENS:
            yield group
            group = []
        group.append(list(one))
    if group:
        yield group


def _prefill_step(model: Any, ids: Sequence[Sequence[int]], ops: Any, device: str) -> Step:
    """Return the metadata of a prefill of whole sequences.

    Its pages belong to one layer, since layers are computed one after another.
    """
    shape: KVShape = model.kv
    lengths = [len(one) for one in ids]
    pages = [-(-n // PAGE_SIZE) for n in lengths]
    one = KVCache.allocate(
        KVShape(1, shape.kv_heads, shape.head_dim), sum(pages), PAGE_SIZE, torch.float32, device
    )
    kv = KVCache(one.k * shape.layers, one.v * shape.layers, PAGE_SIZE)
    tables = torch.zeros(len(ids), max(pages), dtype=torch.int32)
    firsts = [sum(pages[:i]) for i in range(len(pages))]
    for row, (first, count) in enumerate(zip(firsts, pages, strict=True)):
        tables[row, :count] = torch.arange(first, first + count)
    places = [torch.arange(n) for n in lengths]
    slots = torch.cat(
        [place + first * PAGE_SIZE for place, first in zip(places, firsts, strict=True)]
    )
    keys = torch.cat([torch.full((n,), model.rope_key(n)) for n in lengths])
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return Step(
        ids=torch.tensor([i for one in ids for i in one]).to(device),
        positions=torch.cat(places).to(device),
        slots=slots.to(device),
        rope_keys=keys.to(device),
        block_tables=tables.to(device),
        query_start=starts.to(device),
        context_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
        logit_rows=None,
        max_query=max(lengths),
        max_context=max(lengths),
        kv=kv,
        ops=ops,
    )
