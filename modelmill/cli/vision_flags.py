"""The flags that name MiniGPT-4's published files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from modelmill.core.config import path_option_field
from modelmill.core.errors import UsageError

MODEL_TYPE = "minigpt4"
SETTINGS_FILE = "minigpt4.json"


@dataclass(frozen=True, kw_only=True)
class MiniGPT4Files:
    """Parts of MiniGPT-4 in files of their own, beside its language model."""

    llm: Path | None = path_option_field(
        "LLaMA or Vicuna folder, where CHECKPOINT is the word minigpt4", "FOLDER"
    )
    vit: Path | None = path_option_field("EVA's ViT-g (eva_vit_g.pth)", "FILE")
    qformer: Path | None = path_option_field("BLIP-2's Q-Former (blip2_pretrained_….pth)", "FILE")
    projection: Path | None = path_option_field(
        "MiniGPT-4's projection (pretrained_minigpt4.pth); a minigpt4.json beside it is read",
        "FILE",
    )

    def resolve_language_and_vision_paths(self, checkpoint: Path) -> tuple[Path, tuple[Path, ...]]:
        """Split a checkpoint into the language model's path and the vision files.

        Returns:
            The language model, or the only checkpoint; and the vision encoder's files.

        Raises:
            UsageError: if a part is missing or given twice.
        """
        files = tuple(
            each for each in (self.vit, self.qformer, self.projection) if each is not None
        )
        if self.projection is not None and (self.projection.parent / SETTINGS_FILE).is_file():
            files += (self.projection.parent / SETTINGS_FILE,)
        if self.llm is None:
            if str(checkpoint) == MODEL_TYPE and not checkpoint.exists():
                raise UsageError(
                    "minigpt4: there is no such folder here; give a checkpoint's path, or "
                    "MiniGPT-4's parts with --llm, --vit, --qformer and --projection"
                )
            return checkpoint, files
        if str(checkpoint) != MODEL_TYPE:
            raise UsageError(
                f"--llm names the language model, and so does {checkpoint}; write {MODEL_TYPE} in "
                "its place"
            )
        if not files:
            raise UsageError("--llm goes with --vit, --qformer and --projection")
        return self.llm, files
