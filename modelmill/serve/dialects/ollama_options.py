"""The options of Ollama requests and what they mean here."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from modelmill.core.errors import RequestError
from modelmill.core.types import MAX_INT32, MAX_STOP_STRINGS
from modelmill.serve.sampling_schema import sampling_field
from modelmill.serve.strict_models import FAIL_FAST, StrictModel

IGNORED_OPTIONS = {
    "num_ctx": "the context has the length that the engine was started with",
    "num_keep": "a prompt that is too long is refused, never cut",
    "num_batch": "the server's --max-num-batched-tokens decides",
    "num_gpu": "the engine's device was chosen when it was started",
    "main_gpu": "as num_gpu",
    "num_thread": "the server's --threads decides",
    "numa": "how memory is used follows from the engine",
    "low_vram": "as numa",
    "f16_kv": "as numa",
    "vocab_only": "as numa",
    "use_mmap": "as numa",
    "use_mlock": "as numa",
    "logits_all": "as numa",
    "embedding_only": "as numa",
    "penalize_newline": "penalties treat all tokens alike",
}
"""Options that are accepted and change nothing, with the reason."""
NEUTRAL_OPTIONS: dict[str, tuple[float, ...]] = {
    "typical_p": (0, 1),
    "tfs_z": (0, 1),
    "mirostat": (0,),
}
"""Options that would change the text: only these values, which switch them off, are accepted."""
Number = int | float


class OllamaOptions(StrictModel):
    """Sampling options, and those that are accepted and ignored."""

    num_predict: int | None = Field(None, ge=-2, le=MAX_INT32)
    temperature: float | None = sampling_field("temperature")
    top_k: int | None = sampling_field("top_k")
    top_p: float | None = sampling_field("top_p")
    min_p: float | None = sampling_field("min_p")
    seed: int | None = sampling_field("seed", most=2**63 - 1)
    stop: str | Annotated[list[str], FAIL_FAST] | None = Field(None, max_length=4096)
    repeat_penalty: float | None = sampling_field("repetition_penalty")
    repeat_last_n: int | None = Field(None, ge=-1, le=MAX_INT32)
    presence_penalty: float | None = sampling_field("presence_penalty")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    # only their neutral values
    typical_p: Number | None = None
    tfs_z: Number | None = None
    mirostat: int | None = None
    mirostat_eta: float | None = None
    mirostat_tau: float | None = None
    # accepted and ignored
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    logits_all: bool | None = None
    embedding_only: bool | None = None
    penalize_newline: bool | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """The fields of a chat or completion request; only those that are set.

        Raises:
            RequestError: an option is not supported.
        """
        for name, neutral in NEUTRAL_OPTIONS.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise RequestError(f"options.{name} is not supported; leave it out")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not all(stops):
            raise RequestError("options.stop must have strings that are not empty")
        if len(stops) > MAX_STOP_STRINGS:
            raise RequestError(f"options.stop must have at most {MAX_STOP_STRINGS} strings")
        penalized = (
            self.repeat_penalty not in (None, 1.0)
            or self.presence_penalty
            or (self.frequency_penalty)
        )
        if penalized and self.repeat_last_n not in (None, -1):
            raise RequestError(
                "options.repeat_last_n is not supported: penalties count the whole text (-1)"
            )
        fields = {
            "max_tokens": self.num_predict if (self.num_predict or -1) > 0 else None,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": self.seed if (self.seed or 0) >= 0 else None,
            "stop": stops or None,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        return {name: value for name, value in fields.items() if value is not None}
