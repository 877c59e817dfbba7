"""Hugging Face transformers as an independent reference for any supported checkpoint."""

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
from modelmill.core.packages import install_command

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class HfReference:
    """A transformers model that scores and generates greedily: token ids in, token ids out."""

    def __init__(self, model: Any, device: str) -> None:
        self.model = model.eval().to(device)
        self.device = device
        self.dtype = str(model.dtype).removeprefix("torch.")

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Return the float32 logits [T, vocab] of one sequence."""
        return (
            self.model(torch.tensor([list(ids)], device=self.device), use_cache=False)
            .logits[0]
            .float()
        )

    def score(self, windows: Sequence[Sequence[int]]) -> Iterator[list[float]]:
        """Yield log probabilities (natural) in window order.

        A window of T ids has T - 1 values: those of ids[1:], each given the ids before it.
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
        """Generate greedily in one left-padded batch.

        Args:
            prompts: token ids of each prompt.
            max_new_tokens: length of every answer if there are no ``eos_ids``.
            eos_ids: tokens that end an answer; the answer includes them.

        Returns:
            The answers, and for each step of the batch its time in seconds since the call.
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
        timer = _StepTimer()
        outputs = self.model.generate(
            ids, attention_mask=mask, generation_config=config, streamer=timer
        )
        return [_cut_after_eos(row[longest:].tolist(), eos_ids) for row in outputs], timer.times


class _StepTimer:
    """A transformers streamer that records when each step's tokens arrive."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._prompt_received = False
        self.times: list[float] = []

    def put(self, _tokens: Tensor) -> None:
        # The first call passes the prompt.
        if self._prompt_received:
            self.times.append(time.perf_counter() - self._began)
        self._prompt_received = True

    def end(self) -> None:
        """Called by ``generate`` after the last token; nothing is buffered."""


def _cut_after_eos(ids: list[int], eos_ids: Sequence[int]) -> list[int]:
    """Cut ``ids`` after the first end token; the rest is padding."""
    for index, token in enumerate(ids):
        if token in eos_ids:
            return ids[: index + 1]
    return ids


def load_reference(
    checkpoint: Checkpoint, dtype: str = "float32", device: str = "cpu"
) -> HfReference:
    """Load a checkpoint in the transformers class for its model_type; never run its code.

    transformers itself loads a Hugging Face folder. The tensors of any other container are copied,
    under their Hugging Face names, into a model made from the config.

    Raises:
        MissingDependency: if transformers is not installed.
        UnknownArchitecture: if transformers has no class for the model_type.
        TensorMismatch: if names or shapes do not fit.
    """
    try:
        import transformers
    except ImportError:
        raise MissingDependency(
            f"the reference needs transformers; install it with: {install_command('eval')}"
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch_dtype = getattr(torch, dtype)
    model = (
        _load_folder(checkpoint, torch_dtype)
        if _can_load_folder(checkpoint)
        else _load_from_tensors(checkpoint, torch_dtype)
    )
    # The checkpoint's generation_config (sampling, penalties, stops) must not change greedy runs.
    model.generation_config = transformers.GenerationConfig()
    return HfReference(model, device)


def _can_load_folder(checkpoint: Checkpoint) -> bool:
    """Whether transformers can open the checkpoint's path itself (not for a delta)."""
    path = Path(checkpoint.path)
    raw = checkpoint.raw_container
    plain = raw is checkpoint.view and hasattr(raw, "files")
    whole = plain and not type(raw).__name__.startswith("Delta")
    return whole and path.is_dir() and any((path / name).is_file() for name in WEIGHT_FILES)


def _load_folder(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    _make_hf_config(checkpoint)
    return AutoModelForCausalLM.from_pretrained(
        checkpoint.path, dtype=dtype, local_files_only=True, trust_remote_code=False
    )


def _load_from_tensors(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    with _skip_weight_init():
        model = AutoModelForCausalLM.from_config(_make_hf_config(checkpoint), dtype=dtype)
    model.tie_weights()
    parameters = model.state_dict(keep_vars=True)
    filled = set()
    for name in checkpoint.names():
        target = _match_tensor_name(name, parameters, model.base_model_prefix)
        if target is None:
            continue
        value = checkpoint.get(name)
        if parameters[target].shape != value.shape:
            raise TensorMismatch(
                f"{name} has shape {list(value.shape)}, transformers expects "
                f"{list(parameters[target].shape)}"
            )
        with torch.no_grad():
            parameters[target].copy_(value)
        filled.add(parameters[target].data_ptr())
    missing = [
        name for name, parameter in model.named_parameters() if parameter.data_ptr() not in filled
    ]
    if missing:
        raise TensorMismatch(
            f"{checkpoint.path} lacks {', '.join(missing[:5])}, which transformers expects"
        )
    return model


def _make_hf_config(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = checkpoint.model_type
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnknownArchitecture(
            f"transformers has no model for model_type {model_type!r}; run without the reference"
        )
    return AutoConfig.for_model(**{**checkpoint.config, "model_type": model_type})


def _match_tensor_name(name: str, parameters: dict[str, Any], prefix: str) -> str | None:
    """Return a tensor's name in the model; GPT-2's occur with and without the prefix."""
    for candidate in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if candidate in parameters:
            return candidate
    return None


@contextlib.contextmanager
def _skip_weight_init() -> Iterator[None]:
    """Skip the random initialization of transformers if its version allows it."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        yield
        return
    with no_init_weights():
        yield
