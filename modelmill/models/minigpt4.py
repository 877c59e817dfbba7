"""MiniGPT-4 (Zhu et al. 2023, arXiv:2304.10592): a LLaMA that reads pictures through BLIP-2's eyes.

The language model is the plain decoder; ``read`` turns pictures into embeddings that stand in a prompt like tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from modelmill.checkpoint.rename import Rule
from modelmill.core.errors import CheckpointError, UnknownArchitecture
from modelmill.core.find import find
from modelmill.core.quote import quoted
from modelmill.models import _reader, llama
from modelmill.models._eva import EvaSpec
from modelmill.models._qformer import QFormerSpec
from modelmill.models._raw import positive, whole
from modelmill.models._reader import MEAN, STD, Reader, ReaderSpec
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.still import Still
from modelmill.ops.shelf import Ops

PREFIXES = ("",)
# computed in float32 whatever the rest is stored in, as the original does
KEPT = (r"reader\.ln_vision\.(weight|bias)",)
READER = "reader."
LANGUAGE = "llama_model."  # in front of the decoder's tensors (checkpoint.joined)
# of BLIP-2's parts: the queries have no words and no positions; whether words are tied is the language model's
NEUTRAL = {"position_embedding_type": ("absolute",), "num_channels": (3,)}
UNUSED = (
    "image_text_hidden_size", "qformer_config.max_position_embeddings", "use_decoder_only_language_model",
    "tie_word_embeddings", "projection_dim",
)  # fmt: skip
SPOKEN = ("llama", "mistral", "qwen2", "qwen3")
"""Language models that may stand behind the eyes: the plain decoder in all of them, under the same names."""


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The decoder's sizes and the eyes'."""

    reader: ReaderSpec = field(default_factory=lambda: ReaderSpec(EvaSpec(), QFormerSpec(), 4096))


class Model(Decoder):
    """The decoder with eyes. No recipe quantizes the eyes (``unquantized``)."""

    unquantized = (READER,)
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        with torch.device("meta"):
            self.reader = Reader(config.reader)
        # constants on the device, where a graph of ``read`` finds them
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(STD).view(3, 1, 1))
        self.image_size = config.reader.tower.image
        self.image_tokens = config.reader.qformer.queries

    def read(self, pictures: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Pictures [B, 3, S, S] uint8 → embeddings [B, 32, hidden] in the model's type."""
        like = self.reader.visual_encoder.pos_embed
        found: torch.Tensor = self.reader(self.normalised(pictures).to(like.dtype), Still(ops))
        return found

    def normalised(self, pictures: torch.Tensor) -> torch.Tensor:
        """[B, 3, S, S] uint8 → float32."""
        # divided by 255 first and in float32, as torchvision's ToTensor and Normalize do
        return (pictures.float() / 255 - self.mean) / self.std


def configure(raw: Mapping[str, Any]) -> Config:
    """Sizes of both halves. Raises CheckpointError where those of the eyes are missing or do not fit together,
    UnknownArchitecture where the language model is none of ``SPOKEN``."""
    told = raw.get("reader")
    if not isinstance(told, Mapping):
        raise CheckpointError('config.json: of a minigpt4 lacks "reader", the sizes of its eyes')
    spoken = told.get("language", "llama")
    family = find("modelmill.models", str(spoken)) if spoken in SPOKEN else None
    if family is None:
        raise UnknownArchitecture(
            f"the language model behind the eyes is of model_type {quoted(spoken, 60)}; known there are "
            f"{', '.join(SPOKEN)}"
        )
    decoder = family.configure(raw)
    eps = told.get("eps", {})
    if not isinstance(eps, Mapping):
        raise CheckpointError('config.json: "eps" of the eyes is no table')
    tower = EvaSpec(**_sizes(told.get("tower"), EvaSpec()), eps=positive(eps, "tower", default=EvaSpec.eps))
    qformer = QFormerSpec(
        **_sizes(told.get("qformer"), QFormerSpec()), eps=positive(eps, "qformer", default=QFormerSpec.eps)
    )
    for name, spec in (("tower", tower), ("qformer", qformer)):
        if spec.width % spec.heads:
            raise CheckpointError(f"the {name}'s width {spec.width} does not divide into {spec.heads} heads")
    if tower.image % tower.patch:
        raise CheckpointError(f"pictures of {tower.image} pixels do not divide into patches of {tower.patch}")
    shared = {each.name: getattr(decoder, each.name) for each in fields(decoder)}
    between = positive(eps, "between", default=ReaderSpec.norm_eps)
    return Config(**shared, reader=ReaderSpec(tower, qformer, decoder.hidden, between))


def rules(config: Config) -> list[Rule]:
    """The decoder's tensors from behind ``llama_model.``, the eyes' from their own files."""
    decoder = [replace(r, sources=tuple(LANGUAGE + s for s in r.sources)) for r in llama.rules(config)]
    return decoder + [replace(r, target=READER + r.target) for r in _reader.rules(config.reader)]


def drops(config: Config) -> list[str]:
    """What the decoder needs not, and the eyes' unused halves."""
    return [rf"{LANGUAGE}{pattern}" for pattern in llama.drops(config)] + _reader.drops(config.reader)


def _sizes(told: Any, published: Any) -> dict[str, int]:
    """The whole numbers of a spec; what is not told is as published."""
    if not isinstance(told, Mapping):
        raise CheckpointError('config.json: "reader" of a minigpt4 has no tower or no qformer')
    names = {each.name for each in fields(published) if each.name != "eps"}
    unknown = sorted(set(told) - names)
    if unknown:
        raise CheckpointError(f"the eyes have no size {unknown[0]!r}; known are {', '.join(sorted(names))}")
    return {name: whole(told, name) for name in told}
