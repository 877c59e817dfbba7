"""MiniGPT-4's eyes in plain float32: EVA's ViT-g, BLIP-2's norm and Q-Former, the projection.

Written from the papers (arXiv:2211.07636, 2301.12597, 2304.10592) and the layout of the published files. Shares nothing
with models, nn, ops or rename rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modelmill.accept.reference.dense import Affine, project
from modelmill.accept.reference.source import Opened, Source
from modelmill.accept.reference.stage import Norm, Stage

EYES = "visual_encoder"
WORDS = "Qformer.bert"
NORM = 1e-5  # of the norm between tower and Q-Former: torch's default, which BLIP-2 leaves
TOWER_NORM, QFORMER_NORM = 1e-6, 1e-12


class ReaderReference:
    """A checkpoint's eyes. Raises TensorMismatch where tensors are missing.

    own: matrices by the engine's paths that stand in the place of the checkpoint's (accept.own_encoder).
    """

    def __init__(self, checkpoint: Opened, own: Mapping[str, Affine] | None = None) -> None:
        self._own = own or {}
        self.source = Source(checkpoint.raw, torch.float32)
        told: Mapping[str, Any] = checkpoint.config["reader"]
        self.tower, self.asking = told["tower"], told["qformer"]
        self.patch = int(self.source.get(f"{EYES}.patch_embed.proj.weight").shape[-1])
        self.size = self.patch * round((self.source.get(f"{EYES}.pos_embed").shape[1] - 1) ** 0.5)
        eps: Mapping[str, float] = told.get("eps", {})
        self.eps = {"tower": TOWER_NORM, "between": NORM, "qformer": QFORMER_NORM, **eps}
        self.norms: list[Norm] = []

    def normalised(self, picture: Tensor) -> Tensor:
        """[S, S, 3] uint8 → [1, 3, S, S]."""
        mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])
        std = torch.tensor([0.26862954, 0.26130258, 0.27577711])
        return ((picture.float() / 255 - mean) / std).permute(2, 0, 1)[None]

    def stages(self, x: Tensor) -> Iterator[Stage]:
        """From the normalised picture to its embeddings [1, 32, hidden], which the last stage puts out."""
        for stage in self._vit(x):
            yield stage
        seen = stage.expected[0]
        normed = self._norm(("reader.ln_vision", "ln_vision"), seen, self.eps["between"], None, "ln_vision")
        yield Stage("reader.ln_vision", None, "ln_vision", (seen,), (normed,))
        asked = self._get("query_tokens")
        for stage in self._qformer(asked, normed):
            yield stage
        told = stage.expected[0]
        out = self._linear("llama_proj", told)
        yield _flat("reader.proj", None, "proj", told, out)

    def _vit(self, x: Tensor) -> Iterator[Stage]:
        kernel, bias = (self._get(f"{EYES}.patch_embed.proj.{end}") for end in ("weight", "bias"))
        # each patch's pixels against the kernel, from the definition
        patches = F.unfold(x, self.patch, stride=self.patch).transpose(1, 2) @ kernel.flatten(1).t() + bias
        yield Stage("reader.visual_encoder.patch_embed", None, "patch_embed", (x,), (patches,))
        stream = torch.cat((self._get(f"{EYES}.cls_token"), patches), 1) + self._get(f"{EYES}.pos_embed")
        for i in range(int(self.tower["depth"])):
            ours, theirs = f"reader.visual_encoder.blocks.{i}", f"{EYES}.blocks.{i}"
            before = stream
            normed = self._norm((f"{ours}.norm1", f"{theirs}.norm1"), stream, self.eps["tower"], i, "tower.norm1")
            yield Stage(f"{ours}.norm1", i, "tower.norm1", (stream,), (normed,))
            q, k, v = self._linear(f"{theirs}.attn.qkv", normed).chunk(3, -1)
            yield _flat(f"{ours}.attn.qkv", i, "tower.qkv", normed, torch.cat((q, k, v), -1))
            inner = _attended(q, k, v, int(self.tower["heads"]))
            mixed = self._linear(f"{theirs}.attn.proj", inner)
            yield _flat(f"{ours}.attn.proj", i, "tower.proj", inner, mixed)
            yield Stage(f"{ours}.attn", i, "tower.attn", (normed,), (mixed,))
            stream = stream + mixed
            normed = self._norm((f"{ours}.norm2", f"{theirs}.norm2"), stream, self.eps["tower"], i, "tower.norm2")
            yield Stage(f"{ours}.norm2", i, "tower.norm2", (stream,), (normed,))
            inner = self._linear(f"{theirs}.mlp.fc1", normed)
            yield _flat(f"{ours}.mlp.fc1", i, "tower.fc1", normed, inner)
            out = self._linear(f"{theirs}.mlp.fc2", F.gelu(inner))
            yield _flat(f"{ours}.mlp.fc2", i, "tower.fc2", F.gelu(inner), out)
            yield Stage(f"{ours}.mlp", i, "tower.mlp", (normed,), (out,))
            stream = stream + out
            yield Stage(ours, i, "tower.block", (before,), (stream,))

    def matrix(self, name: str) -> Affine:
        """A linear layer of the checkpoint, by its name there; keys have no bias."""
        weight = self._get(f"{name}.weight")
        if not name.endswith(".attn.qkv"):
            return Affine(weight, self._get(f"{name}.bias"))
        q, v = (self._get(f"{name.removesuffix('qkv')}{part}_bias") for part in "qv")
        return Affine(weight, torch.cat((q, torch.zeros_like(q), v)))

    def _qformer(self, x: Tensor, seen: Tensor) -> Iterator[Stage]:
        start = self._norm(
            ("reader.qformer.norm", f"{WORDS}.embeddings.LayerNorm"), x, self.eps["qformer"], None, "qformer.norm"
        )
        yield Stage("reader.qformer.norm", None, "qformer.norm", (x,), (start,))
        x = start
        for i in range(int(self.asking["depth"])):
            ours, theirs = f"reader.qformer.layer.{i}", f"{WORDS}.encoder.layer.{i}"
            before = x
            for part in ("attention", *(("crossattention",) if i % int(self.asking["every"]) == 0 else ())):
                for stage in self._asked((f"{ours}.{part}", f"{theirs}.{part}"), x, seen, i, part):
                    yield stage
                x = stage.expected[0]
            inner = self._linear(f"{theirs}.intermediate_query.dense", x)
            yield _flat(f"{ours}.intermediate_query.dense", i, "qformer.up", x, inner)
            names = (f"{ours}.output_query", f"{theirs}.output_query")
            out = self._linear(f"{names[1]}.dense", F.gelu(inner))
            yield _flat(f"{names[0]}.dense", i, "qformer.down", F.gelu(inner), out)
            x = self._added(names, F.gelu(inner), x, i, "feed_forward")
            yield Stage(ours, i, "qformer.layer", (before, seen), (x,))

    def _asked(self, names: tuple[str, str], x: Tensor, seen: Tensor, layer: int, part: str) -> Iterator[Stage]:
        """Attention of the queries, to themselves or to the picture, with residual and norm."""
        ours, theirs = names
        source = x if part == "attention" else seen
        given = {"query": x, "key": source, "value": source}
        made = {name: self._linear(f"{theirs}.self.{name}", value) for name, value in given.items()}
        for name, value in given.items():
            yield _flat(f"{ours}.self.{name}", layer, f"qformer.{part}.{name}", value, made[name])
        mixed = _attended(made["query"], made["key"], made["value"], int(self.asking["heads"]))
        dense = self._linear(f"{theirs}.output.dense", mixed)
        yield _flat(f"{ours}.output.dense", layer, f"qformer.{part}.dense", mixed, dense)
        out = self._added((f"{ours}.output", f"{theirs}.output"), mixed, x, layer, part)
        yield Stage(ours, layer, f"qformer.{part}", (x, source), (out,))

    def _added(self, names: tuple[str, str], x: Tensor, residual: Tensor, layer: int, module: str) -> Tensor:
        """Projection, residual, norm; names: the engine's and the file's."""
        ours, theirs = names
        total = self._linear(f"{theirs}.dense", x) + residual
        return self._norm(
            (f"{ours}.LayerNorm", f"{theirs}.LayerNorm"), total, self.eps["qformer"], layer, f"qformer.{module}.norm"
        )

    def _norm(self, names: tuple[str, str], x: Tensor, eps: float, layer: int | None, module: str) -> Tensor:
        """A norm, remembered so that its eps can be judged on small inputs."""
        ours, theirs = names
        norm = Norm(ours, self._get(f"{theirs}.weight"), self._get(f"{theirs}.bias"), eps, layer=layer, module=module)
        if all(known.path != ours for known in self.norms):
            self.norms.append(norm)
        return norm(x)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        plain, own = self.matrix(name), self._own.get(f"reader.{name}")
        # biases are never rounded: the checkpoint's judge the engine's
        return project(x, plain if own is None else own._replace(bias=plain.bias))

    def _get(self, name: str) -> Tensor:
        return self.source.get(name)


def _attended(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """[1, T, C] each, every query to every key, head by head."""
    out = []
    for a, b, c in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
        weights = torch.softmax(a @ b.transpose(1, 2) / math.sqrt(a.shape[-1]), -1)
        out.append(weights @ c)
    return torch.cat(out, -1)


def _flat(path: str, layer: int | None, module: str, given: Tensor, expected: Tensor) -> Stage:
    """A linear layer by itself: it reads rows."""
    return Stage(path, layer, module, (given.flatten(0, -2),), (expected.flatten(0, -2),))
