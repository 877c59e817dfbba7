"""Layers of a calibrated recipe: read dense, quantized on the calibration tokens that come through, written.

In memory are the embedding, one layer in float32, the next one as the checkpoint stores it, and the calibration tokens.
Layers that an interrupted build has finished are read back and only passed through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from modelmill.artifact.quantization import path_of, to_bytes
from modelmill.artifact.shard import ShardReader, ShardWriter
from modelmill.artifact.store import Staging
from modelmill.build.pieces import Piece
from modelmill.build.plan import Plan
from modelmill.build.shown import embedded, samples_of
from modelmill.checkpoint.rename import apply
from modelmill.checkpoint.scan import scan
from modelmill.nn.linear import Linear
from modelmill.ops import shelf
from modelmill.quant.block import Block, Flow, Heads
from modelmill.quant.calibrate import quantize_layer
from modelmill.weights import held
from modelmill.weights.dense import Held as Dense

Check = Callable[[torch.Tensor, Piece, Plan], None]


class Layers:
    """The layers of one build, from the first to the last; ``close`` has to be called.

    Raises UsageError for calibration data that is no good.
    """

    def __init__(self, plan: Plan, staging: Staging, check: Check) -> None:
        assert plan.recipe is not None, "a build with a recipe"
        assert plan.calibration is not None, "a recipe that is calibrated"
        self.plan, self.staging, self.check = plan, staging, check
        self.device = plan.device
        sizes = plan.sizes
        self.heads = Heads(sizes.heads, sizes.kv_heads, sizes.head_dim)
        self.model = plan.family.Model(sizes)
        for name, buffer in list(self.model.named_buffers()):
            if not buffer.is_meta:
                self._set(name, buffer.to(self.device))
        files = plan.checkpoint.tokenizer_files()
        self.samples = samples_of(plan.calibration, files, self.model, plan.config.seed)
        self._flow: Flow | None = None
        self._reader = ThreadPoolExecutor(1)
        self._coming: tuple[Sequence[Piece], Future[list[dict[str, torch.Tensor]]]] | None = None

    def close(self) -> None:
        """Read nothing more."""
        self._reader.shutdown()

    def pass_by(self, layer: int, pieces: Iterable[Piece], shard: str) -> None:
        """Through a layer that is finished already."""
        reader = ShardReader(self.staging.path / shard)
        self._put(pieces, lambda piece: {name: reader.get(name) for name in piece.stored})
        self.flow.run(Block(self.model.layers[layer], self.heads))
        self._drop(layer)

    def write(self, layer: int, pieces: Sequence[Piece], writer: ShardWriter, then: Sequence[Piece] = ()) -> None:
        """Quantize a layer and write it, what was done to it first. then: the next one's, read meanwhile."""
        came, self._coming = self._coming, None
        read = came[1].result() if came is not None and came[0] is pieces else self._read_all(pieces)
        del came
        if then:
            self._coming = then, self._reader.submit(self._read_all, then)
        self._put(pieces, lambda _: read.pop(0))
        block = Block(self.model.layers[layer], self.heads)
        with torch.inference_mode():
            recipe = self.plan.recipe_of(f"layers.{layer}.")
            facts, scales = quantize_layer(block, recipe, self.flow, dtype=self.plan.dtype, where=f"layers.{layer}")
        self.staging.write(path_of(layer), to_bytes(facts, scales))
        for piece in pieces:
            for name, tensor in self._stored(piece).items():
                self.check(tensor, piece, self.plan)
                writer.add(name, tensor)
        self._drop(layer)

    @property
    def flow(self) -> Flow:
        """The calibration tokens; embedded when the first layer asks."""
        if self._flow is None:
            embed = [piece for piece in self.plan.pieces if piece.module == "embed"]
            self._put(embed, self._read)
            ops = shelf.resolve(self.device, self.plan.config.kernels)
            ids = [sample.ids for sample in self.samples]
            shown = embedded(self.samples, self.model, self._put_all, ops)
            self._flow = Flow.start(self.model, ids, ops, self.device, shown)
        return self._flow

    # -- inside -----------------------------------------------------------------------------------------------------

    def _read(self, piece: Piece) -> dict[str, torch.Tensor]:
        """One tensor of the checkpoint; norms and biases rounded as they will be stored."""
        checkpoint = self.plan.checkpoint
        tensor = apply(piece.resolved, checkpoint.get, checkpoint.info)
        scan(", ".join(piece.resolved.sources), tensor)
        return {piece.resolved.target: tensor if piece.held is not None else tensor.to(self.plan.dtype)}

    def _read_all(self, pieces: Iterable[Piece]) -> list[dict[str, torch.Tensor]]:
        return [self._read(piece) for piece in pieces]

    def _put_all(self, prefix: str) -> None:
        self._put([piece for piece in self.plan.pieces if piece.resolved.target.startswith(prefix)], self._read)

    def _put(self, pieces: Iterable[Piece], read: Callable[[Piece], Mapping[str, torch.Tensor]]) -> None:
        for piece in pieces:
            tensors = read(piece)
            module = self.model.get_submodule(piece.module)
            if piece.held is None:
                self._set(piece.resolved.target, tensors[piece.resolved.target].to(self.device).float())
            elif set(tensors) == {f"{piece.module}.weight"}:
                assert isinstance(module, Linear)
                # as it is stored and then widened: half the bytes travel
                module.held = Dense(tensors[f"{piece.module}.weight"].to(self.device).float().contiguous())
            else:
                assert isinstance(module, Linear)
                parts = {name.rpartition(".")[2]: t for name, t in tensors.items()}
                module.held = held.from_tensors(piece.held, parts).to(self.device)

    def _stored(self, piece: Piece) -> dict[str, torch.Tensor]:
        if piece.held is None:
            return {piece.resolved.target: self.model.get_buffer(piece.resolved.target).to("cpu", self.plan.dtype)}
        module = self.model.get_submodule(piece.module)
        assert isinstance(module, Linear)
        parts = module.held.to("cpu").tensors()
        if piece.held == "dense":
            parts = {"weight": parts["weight"].to(self.plan.dtype)}
        return {f"{piece.module}.{suffix}": part for suffix, part in parts.items()}

    def _set(self, name: str, value: torch.Tensor) -> None:
        module, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(module), leaf, value)

    def _drop(self, layer: int) -> None:
        self.model.layers[layer] = torch.nn.Identity()
