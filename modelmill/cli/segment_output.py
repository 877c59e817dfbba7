"""Output of ``modelmill segment``: the overlay, a PNG per mask, the JSON and the table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.output import print_table
from modelmill.core.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from modelmill.vision.prompts import Prompt
    from modelmill.vision.sam_model import Mask

OUTPUT_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
MAX_MASKS_SHOWN = 20  # masks of a picture in the table for people


class SegmentOutputs:
    """Files of one run: none over a picture that is read, and none twice.

    overlay: a picture's file, or a folder where there are several; masks: a folder. Raises
    UsageError.
    """

    def __init__(
        self, overlay: Path | None, masks: Path | None, read: Sequence[Path], several: bool
    ) -> None:
        self.overlay, self.masks, self.several = overlay, masks, several
        self._used_paths = {path.resolve() for path in read}
        if masks is not None and masks.exists() and not masks.is_dir():
            raise UsageError(f"--masks {masks}: this is a file; name a folder for the masks")
        if overlay is None:
            return
        if several:
            if overlay.exists() and not overlay.is_dir():
                raise UsageError(
                    f"-o {overlay}: several pictures need a folder, and this is a file"
                )
        elif overlay.is_dir():
            raise UsageError(
                f"-o {overlay} is a folder; name a file in it, for example {overlay / 'masks.png'}"
            )
        elif overlay.suffix.lower() not in OUTPUT_SUFFIXES:
            raise UsageError(
                f"-o {overlay}: no picture format that is written is called {overlay.suffix!r}; "
                "take .png"
            )
        elif overlay.resolve() in self._used_paths:
            raise UsageError(
                f"-o {overlay} is the picture itself, and would be lost; name another file"
            )
        else:
            # a mask in its folder may come to the same name
            self._used_paths.add(overlay.resolve())

    def overlay_path(self, path: Path) -> Path | None:
        """Return the path of a picture's overlay; None if none is requested."""
        if self.overlay is None or not self.several:
            return self.overlay
        return self._unused_path(self.overlay, path.stem)

    def mask_path(self, path: Path, index: int) -> Path | None:
        """Return the path of one of its masks; None if none is requested."""
        return None if self.masks is None else self._unused_path(self.masks, f"{path.stem}-{index}")

    def _unused_path(self, folder: Path, stem: str) -> Path:
        """A PNG of that name, with a number where pictures of the same name came before."""
        names = (f"{stem}.png", *(f"{stem}_{n}.png" for n in range(2, len(self._used_paths) + 3)))
        found = next(
            folder / name for name in names if (folder / name).resolve() not in self._used_paths
        )
        self._used_paths.add(found.resolve())
        return found


def write_result(
    outputs: SegmentOutputs, path: Path, picture: Any, answers: Sequence[Sequence[Mask]],
    prompts: Sequence[Prompt],
    rle: bool,
) -> dict[str, Any]:  # fmt: skip
    """What is told of a picture; writes what was asked for.

    answers: the masks of each prompt, best first; with no prompts those of everything, alone.
    """
    from modelmill.vision.draw import mask_to_image, overlay

    found: dict[str, Any] = {"image": str(path), "size": list(picture.size)}
    target = outputs.overlay_path(path)
    if target is not None:
        shown = (
            [masks[0] for masks in answers if masks]
            if prompts
            else [m for masks in answers for m in masks]
        )
        _save(overlay(picture, shown, prompts), target)
        found["overlay"] = str(target)
    found["masks"] = []
    for place, masks in enumerate(answers):
        for mask in masks:
            index = len(found["masks"])
            mask_dict = mask.to_dict(rle)
            if len(prompts) > 1:
                mask_dict["prompt"] = place
            file = outputs.mask_path(path, index)
            if file is not None:
                _save(mask_to_image(mask), file)
                mask_dict["file"] = str(file)
            found["masks"].append(mask_dict)
    return found


def _save(picture: Any, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        picture.save(target)
    except (
        OSError,
        ValueError,
    ) as error:  # a format that holds no picture of this size raises the latter
        why = error.strerror if isinstance(error, OSError) else None
        raise ArtifactError(f"cannot write {target}: {why or error}") from None


def show_results(results: Iterable[dict[str, Any]]) -> None:
    """For people: each mask's box, score and area; of many masks the first twenty."""
    for result in results:
        if "error" in result:
            continue
        masks = result["masks"]
        several = any("prompt" in mask for mask in masks)
        rows = [
            [i + 1, *([m["prompt"] + 1] if several else []), ",".join(map(str, m["box"])),
            round(m["score"], 4),
             m["area"]]
            for i, m in enumerate(masks[:MAX_MASKS_SHOWN])
        ]  # fmt: skip
        width, height = result["size"]
        more = (
            f", the first {MAX_MASKS_SHOWN} of {len(masks)}" if len(masks) > MAX_MASKS_SHOWN else ""
        )
        print(f"{result['image']}: {width} × {height} pixels, {result['seconds']:.2f} s{more}")
        print_table(("mask", *(["of box"] if several else []), "box", "score", "pixels"), rows)
        if "overlay" in result:
            print(f"drawn: {result['overlay']}")
        files = [mask["file"] for mask in masks if "file" in mask]
        if files:
            print(f"masks: {files[0]}" + (f" … {files[-1]}" if len(files) > 1 else ""))
