"""transformers as the independent reference: any checkpoint of ours in the class that transformers
has for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelmill.checkpoint.open import Checkpoint
from modelmill.core.errors import MissingDependency, TensorMismatch, UnknownArchitecture

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class HfReference:
    """A transformers model: scores and generates greedily. Ids in, ids out."""

    def __init__(self, model: Any, device: str) -> None:
        self.model = model.eval().to(device)
        self.device = device
        self.dtype = str(model.dtype).removeprefix("torch.")

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """float32 logits [T, vocab] of one sequence."""
        return (
            self.model(torch.tensor([list(ids)], device=self.device), use_cache=False)
            .logits[0]
            .float()
        )

    def score(self, windows: Sequence[Sequence[int]]) -> Iterator[list[float]]:
        """For each window of T ids the T - 1 natural-log probabilities of ids[1:], each given those
        before it.
        """
        for window in windows:
            targets = torch.tensor(list(window[1:]), device=self.device)
            loss = torch.nn.functional.cross_entropy(
                self.logits(window)[:-1], targets, reduction="none"
            )
            yield (-loss).tolist()

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos_ids: Sequence[int] = ()
    ) -> tuple[list[list[int]], list[float]]:
        """Greedy answers in one batch padded on the left, and the times of its steps.

        An answer holds the token that ended it; without ``eos_ids`` it has max_new_tokens. Times
        are seconds since
        the call, one for each step of the batch.
        """
        from transformers import GenerationConfig

        longest = max(map(len, prompts))
        ids = torch.tensor(
            [[0] * (longest - len(p)) + list(p) for p in prompts], device=self.device
        )
        mask = torch.tensor(
            [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device
        )
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos_ids) or None,
            pad_token_id=eos_ids[0] if eos_ids else 0,
        )
        clock = _StepTimer()
        found = self.model.generate(
            ids, attention_mask=mask, generation_config=config, streamer=clock
        )
        return [_cut_at_eos(row[longest:].tolist(), eos_ids) for row in found], clock.times


class _StepTimer:
    """Stands where transformers would stream to; notes when each step's tokens came."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._prompt_seen = False
        self.times: list[float] = []

    def put(self, _tokens: Tensor) -> None:
        # The first call brings the prompt back.
        if self._prompt_seen:
            self.times.append(time.perf_counter() - self._began)
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


def _cut_at_eos(ids: list[int], eos_ids: Sequence[int]) -> list[int]:
    """``ids`` up to and with the first that ends an answer; what follows is padding."""
    for place, each in enumerate(ids):
        if each in eos_ids:
            return ids[: place + 1]
    return ids


def load_reference(
    checkpoint: Checkpoint, dtype: str = "float32", device: str = "cpu"
) -> HfReference:
    """The checkpoint in transformers' class for its model_type; no code of the checkpoint is run.

    A Hugging Face folder is loaded by transformers itself; of every other container the tensors are
    copied, under
    their Hugging Face names, into a model made from the config. Raises MissingDependency without
    transformers, UnknownArchitecture where it has no such class, TensorMismatch where names or
    shapes do not fit.
    """
    try:
        import transformers
    except ImportError:
        raise MissingDependency(
            "the reference needs transformers; pip install 'modelmill[eval]'"
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = getattr(torch, dtype)
    model = (
        _load_folder(checkpoint, kind)
        if _is_folder(checkpoint)
        else _load_from_tensors(checkpoint, kind)
    )
    # What the checkpoint's generation_config asks for (sampling, penalties, stops) must not leak
    # into greedy runs.
    model.generation_config = transformers.GenerationConfig()
    return HfReference(model, device)


def _is_folder(checkpoint: Checkpoint) -> bool:
    """Whether transformers can open the checkpoint's path by itself (a delta cannot be)."""
    path = Path(checkpoint.path)
    plain = checkpoint.raw is checkpoint.view and hasattr(checkpoint.raw, "files")
    whole = plain and not type(checkpoint.raw).__name__.startswith("Delta")
    return whole and path.is_dir() and any((path / name).is_file() for name in WEIGHT_FILES)


def _load_folder(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    _config(checkpoint)
    return AutoModelForCausalLM.from_pretrained(
        checkpoint.path, dtype=dtype, local_files_only=True, trust_remote_code=False
    )


def _load_from_tensors(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    with _without_init():
        model = AutoModelForCausalLM.from_config(_config(checkpoint), dtype=dtype)
    model.tie_weights()
    places = model.state_dict(keep_vars=True)
    filled = set()
    for name in checkpoint.names():
        place = _match_tensor_name(name, places, model.base_model_prefix)
        if place is None:
            continue
        value = checkpoint.get(name)
        if places[place].shape != value.shape:
            raise TensorMismatch(
                f"{name} has shape {list(value.shape)}, transformers expects "
                f"{list(places[place].shape)}"
            )
        with torch.no_grad():
            places[place].copy_(value)
        filled.add(places[place].data_ptr())
    missing = [
        name for name, parameter in model.named_parameters() if parameter.data_ptr() not in filled
    ]
    if missing:
        raise TensorMismatch(
            f"{checkpoint.path} lacks {', '.join(missing[:5])}, which transformers expects"
        )
    return model


def _config(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = checkpoint.model_type
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnknownArchitecture(
            f"transformers has no model for model_type {kind!r}; leave the reference out"
        )
    return AutoConfig.for_model(**{**checkpoint.config, "model_type": kind})


def _match_tensor_name(name: str, places: dict[str, Any], prefix: str) -> str | None:
    """Where a tensor goes: gpt2's names occur with and without their prefix."""
    for candidate in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if candidate in places:
            return candidate
    return None


@contextlib.contextmanager
def _without_init() -> Iterator[None]:
    """Leave out transformers' random initialisation, where this version can: every value is
    overwritten.
    """
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        yield
        return
    with no_init_weights():
        yield
