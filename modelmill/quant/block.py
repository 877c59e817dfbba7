"""A decoder layer opened up at its four sites, and the calibration tokens on their way through it.

A site is an input that one or more matrices share: "qkv" (the norm before attention), "o" (what attention mixed), "up"
(the norm before the MLP; gate and up, or GPT-2's fc) and "down" (the activation). Statistics of inputs are collected
under these labels, and a recipe treats what reads the same input together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from modelmill.nn.attention import Rope
from modelmill.nn.kv import KVCache, KVShape
from modelmill.nn.linear import Linear
from modelmill.nn.step import Step

SITES = ("qkv", "o", "up", "down")
PAGE = 16
Shown = Mapping[int, torch.Tensor]
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Heads:
    """How the rows of qkv and the columns of o are divided: q heads, kv heads, channels a head."""

    q: int
    kv: int
    dim: int


class Block:
    """One layer of a model, by site. ``layer`` has the modules that nn.decoder's and GPT-2's layers have in common."""

    def __init__(self, layer: Any, heads: Heads) -> None:
        self.layer = layer
        self.heads = heads
        self.gated = hasattr(layer.mlp, "gate_up_proj")

    @property
    def names(self) -> dict[str, str]:
        """Site → the path of the linear module that reads it."""
        up = "mlp.gate_up_proj" if self.gated else "mlp.fc_proj"
        return {"qkv": "attn.qkv_proj", "o": "attn.o_proj", "up": up, "down": "mlp.down_proj"}

    def linear(self, site: str) -> Linear:
        """The module that reads a site."""
        found = self.layer.get_submodule(self.names[site])
        assert isinstance(found, Linear)
        return found

    def norm(self, site: str) -> nn.Module | None:
        """The norm whose output a site is; None for "o" and "down"."""
        return {"qkv": self.layer.attn_norm, "up": self.layer.mlp_norm}.get(site)


@dataclass
class Batch:
    """Some calibration sequences between two layers, or at a site: x, residual, given are [T, …]."""

    step: Step
    rope: Rope
    x: torch.Tensor
    residual: torch.Tensor | None = None
    given: torch.Tensor | None = None


class Flow:
    """Calibration tokens travelling through the layers, some batches of whole sequences."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = list(batches)

    @staticmethod
    def start(
        model: Any, ids: Sequence[Sequence[int]], ops: Any, device: str, shown: Sequence[Shown] | None = None
    ) -> Flow:
        """Embed sequences of ids. ``model`` needs its embedding alone; all is computed in float32.

        shown: for each sequence the foreign embeddings (of pictures) [L, H] by the position of their first place; the
        ids there are −1 afterwards, since no token stands there.
        """
        batches: list[Batch] = []
        begun = 0
        for group in _grouped(ids):
            step = _step(model, group, ops, device)
            foreign = [] if shown is None else shown[begun : begun + len(group)]
            begun += len(group)
            with torch.inference_mode():
                rope = model.rope(step) if hasattr(model, "rope") else Rope()
                x = model.embed(step.ids, step)
                for first, places in zip(step.query_start.tolist(), foreign, strict=False):
                    for position, embeddings in places.items():
                        at = first + position
                        x[at : at + len(embeddings)] = embeddings.to(x.device, x.dtype)
                        step.ids[at : at + len(embeddings)] = -1
                batches.append(Batch(step, rope, x))
        return Flow(batches)

    def fork(self, batches: int | None = None) -> Flow:
        """Another flow from here, of the first ``batches``, with tensors of its own: ops may add into a residual."""
        return Flow(
            [
                replace(batch, x=batch.x.clone(), residual=None if batch.residual is None else batch.residual.clone())
                for batch in self.batches[:batches]
            ]
        )

    def few(self, tokens: int) -> Flow:
        """Another flow from here, of the first sequences that hold about so many tokens; one at least."""
        batch = self.batches[0]
        ends = batch.step.query_start.tolist()[1:]
        count = max(1, sum(end <= tokens for end in ends))
        end = ends[count - 1]
        step, rope = batch.step, batch.rope
        lengths = step.context_lens[:count]
        cut = replace(
            step,
            **{name: getattr(step, name)[:end] for name in ("ids", "positions", "slots", "rope_keys")},
            block_tables=step.block_tables[:count],
            query_start=step.query_start[: count + 1],
            context_lens=lengths,
            max_query=int(lengths.max()),
            max_context=int(lengths.max()),
        )
        turned = Rope(*(None if t is None else t[:end] for t in (rope.cos, rope.sin, rope.q_scale)))
        residual = None if batch.residual is None else batch.residual[:end].clone()
        return Flow([Batch(cut, turned, batch.x[:end].clone(), residual)])

    @property
    def tokens(self) -> int:
        """Tokens under way."""
        return sum(len(batch.x) for batch in self.batches)

    @torch.inference_mode()
    def reach(self, block: Block, site: str) -> None:
        """Go on from the site before (or the layer's input) to this one."""
        for batch in self.batches:
            _REACH[site](block.layer, batch)

    @torch.inference_mode()
    def leave(self, block: Block) -> None:
        """From the last site out of the layer."""
        for batch in self.batches:
            batch.x = block.layer.mlp.down_proj(batch.given, batch.step)
            batch.given = None

    def run(self, block: Block) -> None:
        """Through a whole layer."""
        for site in SITES:
            self.reach(block, site)
        self.leave(block)

    def given(self) -> Iterator[torch.Tensor]:
        """The inputs at the site reached, batch by batch, [T, K] float32."""
        for batch in self.batches:
            assert batch.given is not None, "between two layers"
            yield batch.given.float()


def _to_qkv(layer: Any, b: Batch) -> None:
    b.given, b.residual = layer.attn_norm(b.x, b.residual, b.step)


def _to_o(layer: Any, b: Batch) -> None:
    attn = layer.attn
    where = attn.rotate.where(b.rope, b.step)
    b.given = attn.mix(attn.rotate(attn.qkv_proj(b.given, b.step), where, b.step), b.step)


def _to_up(layer: Any, b: Batch) -> None:
    b.given, b.residual = layer.mlp_norm(layer.attn.o_proj(b.given, b.step), b.residual, b.step)


def _to_down(layer: Any, b: Batch) -> None:
    mlp = layer.mlp
    first = mlp.gate_up_proj if hasattr(mlp, "gate_up_proj") else mlp.fc_proj
    b.given = mlp.act(first(b.given, b.step), b.step)


_REACH = {"qkv": _to_qkv, "o": _to_o, "up": _to_up, "down": _to_down}


def _grouped(ids: Sequence[Sequence[int]]) -> Iterator[list[list[int]]]:
    """Sequences in batches of about BATCH_TOKENS."""
    group: list[list[int]] = []
    for one in ids:
        if group and sum(map(len, group)) + len(one) > BATCH_TOKENS:
            yield group
            group = []
        group.append(list(one))
    if group:
        yield group


def _step(model: Any, ids: Sequence[Sequence[int]], ops: Any, device: str) -> Step:
    """A prefill of whole sequences. Its pages are one layer's, since layers are computed one after another."""
    shape: KVShape = model.kv
    lengths = [len(one) for one in ids]
    pages = [-(-n // PAGE) for n in lengths]
    one = KVCache.allocate(KVShape(1, shape.kv_heads, shape.head_dim), sum(pages), PAGE, torch.float32, device)
    kv = KVCache(one.k * shape.layers, one.v * shape.layers, PAGE)
    tables = torch.zeros(len(ids), max(pages), dtype=torch.int32)
    firsts = [sum(pages[:i]) for i in range(len(pages))]
    for row, (first, count) in enumerate(zip(firsts, pages, strict=True)):
        tables[row, :count] = torch.arange(first, first + count)
    places = [torch.arange(n) for n in lengths]
    slots = torch.cat([place + first * PAGE for place, first in zip(places, firsts, strict=True)])
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
