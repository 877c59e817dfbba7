"""What will be built and why: every "auto" resolved, every tensor accounted for, memory told before it is taken."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import torch

import modelmill
from modelmill.build import memory_plan
from modelmill.build.auto import AUTO, Found, resolve_auto
from modelmill.build.calibration import Source, find_source
from modelmill.build.config_keys import checked_keys
from modelmill.build.head import settled_head
from modelmill.build.keep import resolve_keep
from modelmill.build.kinds import LANGUAGE, check_options, described, kind_of, still_memory
from modelmill.build.memory_plan import BuildMemory
from modelmill.build.pieces import TOWER, Piece, how_held, piece_of, pieces_of, quantized_of, renames_of
from modelmill.build.resolve import check_generation, find_family, resolved
from modelmill.build.shown import has_eyes, with_pictures
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.rename import Resolved
from modelmill.core import ram
from modelmill.core.config import BuildConfig, to_dict
from modelmill.core.config_view import ConfigView
from modelmill.core.errors import UsageError
from modelmill.core.generation import Generation, read_generation
from modelmill.core.size import byte_text
from modelmill.nn.kv import DTYPES as KV_DTYPES
from modelmill.nn.kv import KVShape, held_dtype
from modelmill.ops import shelf
from modelmill.quant.layered import Layered
from modelmill.quant.recipe import Recipe, make_recipe
from modelmill.quant.still import Rounded, still_reason, still_recipe
from modelmill.weights.held import EXPANDED_SHARE, expanded_size

PACKING = "rows/1"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """A build, decided. ``config`` has no "auto" left; ``reasons`` say why each was resolved as it was.

    recipe: how linears are quantized, None where they are kept. calibration: what it takes statistics on, if any.
    found: what ``-q auto`` measured. chosen_on: the text that it measured on. warnings: what the config says and has no
    effect, and what else whoever builds should know of the checkpoint.
    """

    checkpoint: Checkpoint
    config: BuildConfig
    family: ModuleType
    sizes: Any
    max_model_len: int
    pieces: tuple[Piece, ...]
    aliases: dict[str, str]
    reasons: dict[str, str]
    recipe: Recipe | None = None
    calibration: Source | None = None
    found: Found | None = None
    chosen_on: Source | None = None
    warnings: tuple[str, ...] = ()

    @property
    def read(self) -> Source | None:
        """The text that anything of the engine follows from: no evaluation may be done on it."""
        return self.calibration or self.chosen_on

    def recipe_of(self, module: str) -> Recipe:
        """What quantizes a linear module, or a layer ("layers.3.")."""
        if module.startswith(TOWER):
            return Rounded(self.config)
        assert self.recipe is not None, "a build with a recipe"
        return self.recipe.of(module) if hasattr(self.recipe, "of") else self.recipe

    @property
    def kind(self) -> str:
        """What the engine will do: "language" or "segmentation"."""
        return kind_of(self.family)

    @property
    def generation(self) -> Generation | None:
        """The defaults of the engine's requests; None for a model of images."""
        if self.kind != LANGUAGE:
            return None
        return read_generation(self.checkpoint.generation_config, self.checkpoint.container)

    @property
    def dtype(self) -> torch.dtype:
        """The activations' type."""
        return getattr(torch, self.config.dtype)

    @property
    def device(self) -> str:
        """Where weights are rounded and calibration tokens travel: the target, where it is here."""
        return "cuda" if self.config.target == "cuda" and torch.cuda.is_available() else "cpu"

    @property
    def held(self) -> dict[str, str]:
        """Linear module → held kind."""
        out = {p.module: p.held for p in self.pieces if p.held is not None}
        for ours, theirs in self.aliases.items():
            out.setdefault(ours.rpartition(".")[0], "dense")
            assert theirs
        return out

    def shards(self) -> dict[str, list[Piece]]:
        """Weight file → its tensors: one file a layer, so that an interrupted build loses one layer at most."""
        out: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            parts = piece.module.split(".")
            name = f"layer-{int(parts[1]):04d}" if parts[0] == "layers" else "ends"
            if parts[:3] == ["reader", "visual_encoder", "blocks"]:
                name = f"reader-{int(parts[3]):04d}"
            elif parts[0] == "reader":
                name = "reader"
            if parts[0] == "image_encoder" and len(parts) > 2 and parts[1] in ("blocks", "layers"):
                name = f"encoder-{int(parts[2]):04d}"
            out.setdefault(f"weights/{name}.safetensors", []).append(piece)
        return dict(sorted(out.items()))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, on disk and in memory alike."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def expanded_bytes(self) -> int:
        """Bytes that weights take beside what is stored where no compiled kernel serves them on this CPU.

        They are expanded once at load, as far as memory goes (``runtime.expand``).
        """
        if self.config.target != "cpu":
            return 0
        chosen = shelf.resolve("cpu", self.config.kernels).chosen
        sizes = [expanded_size(p.held, p.shape, self.dtype) for p in self.pieces if p.held is not None]
        total = sum(size for op, size in filter(None, sizes) if chosen[op] == "torch")
        return min(total, int(EXPANDED_SHARE * max(ram.memory().total - self.weight_bytes, 0)))

    @cached_property
    def build_memory(self) -> BuildMemory:
        """What the build itself takes, judging included."""
        shared = memory_plan.process_bytes(), memory_plan.mapped_bytes(self.checkpoint, self.pieces)
        writing = memory_plan.writing_bytes(self.checkpoint, self.pieces)
        if self.kind != LANGUAGE:
            encoding = int(memory_plan.ENCODING_SHARE * self._encoder_workspace)
            return BuildMemory(*shared, writing, 0, memory_plan.ENCODING + encoding)
        judging = memory_plan.judging_bytes(self.checkpoint, self.pieces, self.sizes.vocab, self.sizes.hidden)
        judging += min(self.expanded_bytes, int(EXPANDED_SHARE * ram.memory().free))
        calibrating = 0
        if self.calibration is not None and self.device == "cuda":
            # the tokens, their statistics and the layer are there; here one is read, and one read ahead
            calibrating = memory_plan.reading_bytes(self.pieces)
        elif self.calibration is not None:
            tokens = self.calibration.samples * self.calibration.length
            calibrating = memory_plan.calibrating_bytes(self.pieces, tokens, self.sizes.hidden, self.sizes.inner)
        return BuildMemory(*shared, writing, calibrating, judging)

    @property
    def token_bytes(self) -> int:
        """KV cache per token of context, as the engine keeps it by default."""
        return self._kv.page_bytes(1, held_dtype(self.config.kv_cache_dtype, self.dtype))

    @property
    def _kv(self) -> KVShape:
        return KVShape(self.sizes.layers, self.sizes.kv_heads, self.sizes.head_dim)

    @cached_property
    def memory(self) -> dict[str, Any]:
        """Now and at run time, in bytes; the largest batch × length that fits, or why it does not."""
        total, free = device_memory(self.config.target)
        expanded = self.expanded_bytes
        if self.kind != LANGUAGE:
            room = (total, free)
            told = still_memory(self.sizes, self.weight_bytes + expanded, room, self.dtype.itemsize)
            return told | self._build_facts
        workspace = 4 * 8192 * max(self.sizes.inner * 2, self.sizes.hidden * 4) * self.dtype.itemsize
        left = int(total * 0.9) - self.weight_bytes - expanded - workspace
        tokens = max(left, 0) // self.token_bytes
        full = tokens // self.max_model_len
        if left <= 0:
            needed, there = byte_text(self.weight_bytes + expanded + workspace), byte_text(total)
            verdict = f"does not fit: weights and workspace need {needed}, the device has {there}; try -q int8"
        elif full < 1:
            verdict = f"{self.max_model_len} tokens do not fit; the longest that do: --max-model-len {tokens}"
        else:
            verdict = f"{full} sequences of {self.max_model_len} tokens, or {tokens} tokens in any mixture"
        return {
            "device_total": total,
            "device_free": free,
            "weights": self.weight_bytes,
            "expanded": expanded,
            **self._build_facts,
            "kv_per_token": self.token_bytes,
            "kv_per_token_8bit": self._kv.page_bytes(1, KV_DTYPES["int8"]),
            "workspace": workspace,
            "kv_tokens": tokens,
            "max_batch_at_max_len": full,
            "fits": verdict,
        }

    @property
    def _build_facts(self) -> dict[str, int]:
        """What a build takes, for --dry-run: at its peak, and how much of it are pages of mapped files."""
        return {"build_peak": self.build_memory.peak, "build_mapped": self.build_memory.mapped}

    @property
    def _encoder_workspace(self) -> int:
        """Bytes of an image engine's widest layer in float32, as the reference computes it."""
        return int(still_memory(self.sizes, 0, (0, 0), 4)["workspace"])

    def key(self) -> str:
        """What is being built and by which version; an interrupted build of another key is not resumed."""
        parts = (
            modelmill.__version__,
            self.checkpoint.quick_fingerprint(),
            to_dict(self.config),
            PACKING,
            self.max_model_len,
            torch.__version__,
            # what a warning is about may be decided otherwise by another version of this code
            *self.warnings,
        )
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """The plan as JSON-able facts, for --dry-run."""
        kinds: dict[str, int] = {}
        for piece in self.pieces:
            label = piece.held or "plain"
            kinds[label] = kinds.get(label, 0) + piece.nbytes
        return {
            "checkpoint": str(self.checkpoint.path),
            "container": self.checkpoint.container,
            "model_type": self.checkpoint.model_type,
            "build": to_dict(self.config),
            "reasons": self.reasons,
            "warnings": list(self.warnings),
            "max_model_len": self.max_model_len,
            "kind": self.kind,
            "layers": getattr(self.sizes, "layers", None),
            "tensors": len(self.pieces),
            "tokenizer": bool(self.checkpoint.tokenizer_files()),
            "bytes_by_kind": kinds,
            "auto": None if self.found is None else self.found.describe(),
            "memory": self.memory,
            "sampling": None if self.generation is None else self.generation.told(),
        }


def layer_of(shard: str) -> int | None:
    """The layer that a weight file holds; None for what stands around the layers."""
    number = shard.removesuffix(".safetensors").rpartition("layer-")[2]
    return int(number) if number.isdigit() else None


def make_plan(checkpoint: Checkpoint, config: BuildConfig, progress: Progress | None = None) -> Plan:
    """Decide everything, reading no weights (but for ``-q auto``, which measures; progress: as ``builder.build``'s).

    Raises CheckpointError (UnknownArchitecture, …) or UsageError.
    """
    checkpoint = described(checkpoint)
    family = find_family(checkpoint)
    sizes, warnings = _configured(checkpoint, family)
    if kind_of(family) != LANGUAGE:
        return replace(_still_plan(checkpoint, config, family, sizes), warnings=tuple(warnings))
    check_generation(checkpoint, int(sizes.vocab))
    sizes, said = settled_head(checkpoint, family, sizes)
    config, kept = resolve_keep(checkpoint, config)
    renames = renames_of(checkpoint, family, sizes)
    config, found = resolve_auto(checkpoint, config, family, sizes, renames, progress)
    recipe = Layered(config, sizes.layers) if config.quantization == AUTO else make_recipe(config)
    limit = getattr(sizes, "limit", None) or sizes.max_len
    length = config.max_model_len or sizes.max_len
    if length > limit:
        raise UsageError(f"--max-model-len {length} is more than this model computes ({limit})")
    calibrated = recipe is not None and recipe.calibrated
    source = find_source(config, length) if calibrated or found is not None else None
    if source is not None and has_eyes(checkpoint.tokenizer_files()):
        source = with_pictures(source)
    config, reasons = resolved(checkpoint, config, recipe, source)
    recipe = Layered(config, sizes.layers) if isinstance(recipe, Layered) else recipe
    reasons |= kept
    shelf.resolve(config.target if config.target == "cpu" or torch.cuda.is_available() else "cpu", config.kernels)
    with torch.device("meta"):
        model = family.Model(sizes)
    if config.tower != "none" and not any(name.startswith(TOWER) for name, _ in model.named_modules()):
        raise UsageError(f"--tower {config.tower}: {checkpoint.path} reads no pictures; leave it out")
    pieces = tuple(pieces_of(checkpoint, config, recipe, model, renames, family))
    aliases = {"head.weight": "embed.weight"} if sizes.tied else {}
    if sizes.tied and "head" in quantized_of(model, config):
        # the embedding stays as it is; the head gets its own quantized copy of the same rows
        embed = next(p for p in pieces if p.module == "embed" and p.resolved.target == "embed.weight")
        copy = Resolved("head.weight", embed.resolved.sources, embed.resolved.how)
        pieces = (*pieces, piece_of(checkpoint, config, copy, "head", how_held(recipe, config, "head")))
        aliases = {}
    calibration, chosen_on = source if calibrated else None, source if found is not None else None
    return Plan(
        checkpoint, config, family, sizes, length, pieces, aliases, reasons, recipe, calibration, found, chosen_on,
        (*warnings, *said),
    )  # fmt: skip


def _configured(checkpoint: Checkpoint, family: ModuleType) -> tuple[Any, list[str]]:
    """The family's sizes, and what there is to say of keys that it does not read. Raises CheckpointError."""
    view = ConfigView(checkpoint.config)
    sizes = family.configure(view)
    view.leave(checkpoint.unread)
    where = checkpoint.path.name if checkpoint.container.endswith("gguf") else "config.json"
    return sizes, checked_keys(view, family, where)


def _still_plan(checkpoint: Checkpoint, config: BuildConfig, family: ModuleType, sizes: Any) -> Plan:
    """The same for a model of images: no tokens, so no length, no head and nothing to calibrate on."""
    check_options(config, checkpoint.path)
    recipe = still_recipe(config)
    config, reasons = resolved(checkpoint, config, recipe, None)
    if recipe is not None:
        reasons["quantization"] = still_reason(config)
    shelf.resolve(config.target if config.target == "cpu" or torch.cuda.is_available() else "cpu", config.kernels)
    renames = renames_of(checkpoint, family, sizes)
    model = family.Model(sizes)
    pieces = tuple(pieces_of(checkpoint, config, recipe, model, renames, family))
    return Plan(checkpoint, config, family, sizes, 1, pieces, {}, reasons, recipe)


def device_memory(target: str) -> tuple[int, int]:
    """(total, free) bytes of the device; the CPU's where the target is not here."""
    if target == "cuda" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total, free
    return ram.memory()
