"""``modelmill segment``: masks of what one points at in pictures, or of everything in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.engine import ENGINE_HELP, CacheBuild, changed
from modelmill.cli.options import Common, borrow, config
from modelmill.cli.output import emit_json, note, progress, table
from modelmill.core.config import RunConfig, option
from modelmill.core.errors import ArtifactError, RequestError, UsageError

if TYPE_CHECKING:
    from modelmill.segmenter import Segmenter
    from modelmill.vision.prompts import Prompt
    from modelmill.vision.segment import Mask, Seen

HELP = "Segment pictures: masks of what points, boxes or a mask mark, or of everything in them."
MORE = """Coordinates are the picture's pixels, x from the left and y from the top. Without --single three masks answer
a prompt, best first; the overlay shows the best one.

Examples:

  modelmill segment sam.engine truck.jpg --point 500,375 -o truck.png

  modelmill segment sam.engine truck.jpg --box 425,600,700,875 --point 575,750 --label 0 --json

  modelmill segment sam.engine photos/ --everything -o masked/"""

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


@dataclass(frozen=True, kw_only=True)
class Args(Common):
    """One kind of question: prompts, or everything."""

    engine: Path = option(help=ENGINE_HELP, positional=True, metavar="ENGINE")
    images: tuple[Path, ...] = option(
        help="pictures, folders of pictures, or globs", positional=True, required=True, metavar="IMAGE…"
    )
    point: tuple[str, ...] = option((), "X,Y of a point (repeatable)", metavar="X,Y")
    label: tuple[int, ...] = option((), "1: the point is on the object, 0: it is not; one a point (default: 1)")
    box: str | None = option(None, "the object's box", metavar="X0,Y0,X1,Y1")
    mask: Path | None = option(None, "picture of a rough mask, white is the object", metavar="FILE")
    single: bool = option(False, "one mask, for a prompt that is clear, instead of three", flags=("--single",))
    everything: bool = option(False, "segment all of each picture", flags=("--everything",))
    points_per_side: int = option(32, "for --everything: points of the grid on each side")
    crop_layers: int = option(0, "for --everything: look again at 4, 16, … parts of the picture")
    min_region: int = option(0, "for --everything: fill holes and drop islands of fewer pixels")
    output: Path | None = option(
        None, "picture with the masks drawn over it; for several pictures a folder", flags=("-o", "--output"),
        metavar="OUT.png",
    )  # fmt: skip
    masks: Path | None = option(None, "folder for every mask as a black and white PNG", metavar="FOLDER")
    rle: bool = option(False, "with --json: the masks' pixels as COCO run lengths", flags=("--rle",))
    batch: int = option(4, "pictures that the encoder sees at a time")
    build: CacheBuild = config(CacheBuild, "A checkpoint in the engine's place")
    device: str = borrow(RunConfig, "device")
    threads: int | None = borrow(RunConfig, "threads")


def run(args: Args) -> int:
    """Segment, draw, tell. 1 where a picture of several could not be read; a single one raises."""
    from modelmill.segmenter import Segmenter

    question = _question(args)
    paths = expand(args.images)
    several = len(paths) > 1
    _check_outputs(args, several)
    with progress("building") as told:
        segmenter = Segmenter(
            args.engine, device=args.device, threads=args.threads, progress=told, **changed(args.build)
        )
    results = []
    with progress("segmenting", quiet=not several and not args.everything) as told:
        for result in answers(args, segmenter, paths, question, told):
            if not several and "error" in result:
                raise RequestError(result["error"])
            results.append(result)
            if "error" in result:
                note(result["error"])
    if args.json:
        emit_json({"engine": str(args.engine), "images": results} if several else results[0])
    else:
        _show(results)
    return 1 if any("error" in result for result in results) else 0


def expand(given: tuple[Path, ...]) -> list[Path]:
    """Files of paths, folders (their pictures, by name) and globs. Raises UsageError where there is nothing."""
    found: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
            if not inside:
                raise UsageError(f"{path}: there are no pictures in this folder ({', '.join(SUFFIXES)})")
            found += inside
        elif path.exists() or not any(c in str(path) for c in "*?["):
            found.append(path)
        else:
            matches = sorted(_glob(path))
            if not matches:
                raise UsageError(f"{path}: no file matches")
            found += matches
    return list(dict.fromkeys(found))


def _glob(path: Path) -> Iterator[Path]:
    import glob

    return (Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())


def _question(args: Args) -> Prompt | None:
    """What is asked of each picture; None for everything. A mask's own logits come later. Raises UsageError."""
    from modelmill.vision.prompts import make

    asked = bool(args.point) or args.box is not None or args.mask is not None
    if args.everything:
        if asked or args.label or args.single:
            raise UsageError("--everything takes no point, label, box, mask or --single; leave one or the other out")
        return None
    if not asked:
        raise UsageError("what is to be segmented? give --point X,Y, --box X0,Y0,X1,Y1, --mask FILE or --everything")
    if args.rle and not args.json:
        raise UsageError("--rle writes into the JSON: add --json")
    points = [numbers(text, 2, "--point", "X,Y") for text in args.point]
    box = None if args.box is None else numbers(args.box, 4, "--box", "X0,Y0,X1,Y1")
    if not points and args.label:
        raise UsageError("--label belongs to a --point, and there is none")
    import torch

    stand_in = None if args.mask is None else torch.zeros(1, 1)
    return make(points, args.label or None, box, stand_in)


def numbers(text: str, count: int, flag: str, form: str) -> list[float]:
    """Comma-separated numbers. Raises UsageError that shows the form."""
    parts = text.replace(" ", "").split(",")
    try:
        found = [float(part) for part in parts]
    except ValueError:
        found = []
    if len(found) != count:
        raise UsageError(f"{flag} takes {form}, not {text[:80]!r}")
    return found


def _check_outputs(args: Args, several: bool) -> None:
    from PIL import Image

    if args.batch < 1 or args.batch > 64:
        raise UsageError(f"--batch {args.batch} is outside 1…64")
    if args.output is None:
        return
    if several:
        if args.output.exists() and not args.output.is_dir():
            raise UsageError(f"-o {args.output}: several pictures need a folder, and this is a file")
    elif args.output.is_dir():
        raise UsageError(f"-o {args.output} is a folder; name a file in it, for example {args.output / 'masks.png'}")
    elif args.output.suffix.lower() not in Image.registered_extensions():
        raise UsageError(f"-o {args.output}: no picture format is called {args.output.suffix!r}; take .png")


def answers(
    args: Args, segmenter: Segmenter, paths: list[Path], question: Prompt | None, told: Callable[..., None]
) -> Iterator[dict[str, Any]]:
    """One result a picture, in order; pictures are read and seen a few at a time."""
    from modelmill.vision.image import open_image

    size = 1 if question is None else args.batch
    for start in range(0, len(paths), size):
        part, began = paths[start : start + size], time.perf_counter()
        pictures: list[Any] = []
        for path in part:
            try:
                pictures.append(open_image(path))
            except RequestError as error:
                pictures.append(error)
        good = [p for p in pictures if not isinstance(p, RequestError)]
        seen = iter(_seen(segmenter, good) if good and question is not None else [None] * len(good))
        share = (time.perf_counter() - began) / len(part)
        for index, (path, picture) in enumerate(zip(part, pictures, strict=True)):
            began = time.perf_counter()
            if isinstance(picture, RequestError):
                yield {"image": str(path), "error": str(picture)}
            else:
                try:
                    embedded = next(seen)
                    if isinstance(embedded, RequestError):
                        raise RequestError(f"{path}: {embedded}")
                    masks, prompt = _masks(args, segmenter, picture, question, embedded, told)
                    took = share + time.perf_counter() - began  # to the masks; drawing them is not segmenting
                    result = _told(args, path, picture, masks, prompt, len(paths) > 1)
                    yield {**result, "seconds": round(took, 4)}
                except RequestError as error:
                    yield {"image": str(path), "error": str(error)}
            told("segmenting", start + index + 1, len(paths))


def _seen(segmenter: Segmenter, pictures: list[Any]) -> list[Seen | RequestError]:
    """Embeddings of several pictures, together; where they cannot be, one by one, with what is wrong with each."""
    found: list[Seen | RequestError] = []
    try:
        found += segmenter.see(pictures)
    except RequestError as error:
        if len(pictures) == 1:
            return [error]
        for picture in pictures:
            found += _seen(segmenter, [picture])
    return found


def _masks(
    args: Args, segmenter: Segmenter, picture: Any, question: Prompt | None, seen: Seen | None,
    told: Callable[..., None],
) -> tuple[list[Mask], Prompt | None]:  # fmt: skip
    from dataclasses import replace

    from modelmill.vision.draw import as_prompt
    from modelmill.vision.everything import Everything
    from modelmill.vision.image import open_image
    from modelmill.vision.prompts import check_inside

    if question is None or seen is None:
        options = Everything(
            points_per_side=args.points_per_side,
            crop_n_layers=args.crop_layers,
            min_mask_region_area=args.min_region,
        )
        return segmenter.everything(picture, options, progress=lambda done, of: told("points", done, of)), None
    check_inside(question, picture.size)
    if args.mask is not None:
        given = open_image(args.mask)
        image = segmenter.eye.image
        question = replace(question, mask=as_prompt(given, seen.size, seen.fitted, image // 4, image))
    return segmenter.predict_all([question], seen=seen, multimask=not args.single)[0], question


def _told(
    args: Args, path: Path, picture: Any, masks: list[Mask], prompt: Prompt | None, several: bool
) -> dict[str, Any]:
    """What is told of a picture; writes what was asked for."""
    from modelmill.vision.draw import as_picture, overlay

    found: dict[str, Any] = {"image": str(path), "size": list(picture.size)}
    if args.output is not None:
        target = args.output / f"{path.stem}.png" if several else args.output
        _save(overlay(picture, masks if prompt is None else masks[:1], prompt), target)
        found["overlay"] = str(target)
    found["masks"] = [mask.to_dict(args.rle) for mask in masks]
    if args.masks is not None:
        for index, mask in enumerate(masks):
            target = args.masks / f"{path.stem}-{index}.png"
            _save(as_picture(mask), target)
            found["masks"][index]["file"] = str(target)
    return found


def _save(picture: Any, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        picture.save(target)
    except OSError as error:
        raise ArtifactError(f"cannot write {target}: {error.strerror or error}") from None


def _show(results: list[dict[str, Any]]) -> None:
    """For people: each mask's box, score and area; of many masks the first twenty."""
    for result in results:
        if "error" in result:
            continue
        masks = result["masks"]
        rows = [
            [i + 1, ",".join(map(str, m["box"])), round(m["score"], 4), m["area"]] for i, m in enumerate(masks[:20])
        ]
        width, height = result["size"]
        more = f", the first 20 of {len(masks)}" if len(masks) > 20 else ""
        print(f"{result['image']}: {width} × {height} pixels, {result['seconds']:.2f} s{more}")
        table(("mask", "box", "score", "pixels"), rows)
        if "overlay" in result:
            print(f"drawn: {result['overlay']}")
