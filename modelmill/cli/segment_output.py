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
MAX_MASK_ROWS_PRINTED = 20  # rows of the printed table per picture


class SegmentOutputPaths:
    """Paths of the files that one run writes; none is an input picture, and none is used twice."""

    def __init__(
        self, overlay: Path | None, masks: Path | None, read: Sequence[Path], several: bool
    ) -> None:
        """Check the paths.

        Args:
            overlay: file of the overlay; a folder if there are several pictures.
            masks: folder of the masks.
            read: input files.
            several: whether there are several pictures.

        Raises:
            UsageError: if a path cannot be written or is an input.
        """
        self.overlay = overlay
        self.masks = masks
        self.several = several
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
                f"-o {overlay}: cannot write the picture format {overlay.suffix!r}; use .png"
            )
        elif overlay.resolve() in self._used_paths:
            raise UsageError(
                f"-o {overlay} is an input picture and would be overwritten; name another file"
            )
        else:
            # a mask in the same folder could have this name
            self._used_paths.add(overlay.resolve())

    def reserve_overlay_path(self, path: Path) -> Path | None:
        """Return the path of a picture's overlay; None if none is requested."""
        if self.overlay is None or not self.several:
            return self.overlay
        return self._reserve_unused_png_path(self.overlay, path.stem)

    def reserve_mask_path(self, path: Path, index: int) -> Path | None:
        """Return the path of one of its masks; None if none is requested."""
        return (
            None
            if self.masks is None
            else self._reserve_unused_png_path(self.masks, f"{path.stem}-{index + 1}")
        )

    def _reserve_unused_png_path(self, folder: Path, stem: str) -> Path:
        """Return a PNG path of that stem, with a number if the name is already used."""
        names = (f"{stem}.png", *(f"{stem}_{n}.png" for n in range(2, len(self._used_paths) + 3)))
        path = next(
            folder / name for name in names if (folder / name).resolve() not in self._used_paths
        )
        self._used_paths.add(path.resolve())
        return path


def write_segment_result(
    outputs: SegmentOutputPaths, path: Path, picture: Any, answers: Sequence[Sequence[Mask]],
    prompts: Sequence[Prompt],
    rle: bool,
) -> dict[str, Any]:  # fmt: skip
    """Write the requested files of a picture and return its result as JSON data.

    Args:
        outputs: paths of the files.
        path: the picture's file.
        picture: the picture.
        answers: the masks of each prompt, best first; without prompts one list of all masks.
        prompts: the prompts; empty for everything.
        rle: whether the JSON has the masks' pixels as run lengths.

    Raises:
        ArtifactError: if a file cannot be written.
    """
    from modelmill.vision.draw import mask_to_image, overlay_masks

    result: dict[str, Any] = {"image": str(path), "size": list(picture.size)}
    target = outputs.reserve_overlay_path(path)
    if target is not None:
        shown = (
            [masks[0] for masks in answers if masks]
            if prompts
            else [m for masks in answers for m in masks]
        )
        _save_picture(overlay_masks(picture, shown, prompts), target)
        result["overlay"] = str(target)
    result["masks"] = []
    for place, masks in enumerate(answers):
        for mask in masks:
            index = len(result["masks"])
            mask_dict = mask.to_dict(rle)
            if len(prompts) > 1:
                mask_dict["prompt"] = place
            file = outputs.reserve_mask_path(path, index)
            if file is not None:
                _save_picture(mask_to_image(mask), file)
                mask_dict["file"] = str(file)
            result["masks"].append(mask_dict)
    return result


def _save_picture(picture: Any, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        picture.save(target)
    except (
        OSError,
        ValueError,
    ) as error:  # ValueError: the format does not support this size
        why = error.strerror if isinstance(error, OSError) else None
        raise ArtifactError(
            f"cannot write {target}: {why or error}; choose another place with -o or --masks"
        ) from None


def show_segment_results(results: Iterable[dict[str, Any]]) -> None:
    """Print each mask's box, score and area; at most MAX_MASK_ROWS_PRINTED masks per picture."""
    for result in results:
        if "error" in result:
            continue
        masks = result["masks"]
        several = any("prompt" in mask for mask in masks)
        rows = [
            [i + 1, *([m["prompt"] + 1] if several else []), ",".join(map(str, m["box"])),
            round(m["score"], 4),
             m["area"]]
            for i, m in enumerate(masks[:MAX_MASK_ROWS_PRINTED])
        ]  # fmt: skip
        width, height = result["size"]
        more = (
            f", the first {MAX_MASK_ROWS_PRINTED} of {len(masks)}"
            if len(masks) > MAX_MASK_ROWS_PRINTED
            else ""
        )
        print(f"{result['image']}: {width} × {height} pixels, {result['seconds']:.2f} s{more}")
        print_table(("mask", *(["of box"] if several else []), "box", "score", "pixels"), rows)
        if "overlay" in result:
            print(f"drawn: {result['overlay']}")
        files = [mask["file"] for mask in masks if "file" in mask]
        if files:
            print(f"masks: {files[0]}" + (f" … {files[-1]}" if len(files) > 1 else ""))
