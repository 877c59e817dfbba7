"""``modelmill segment``: masks of what one points at in pictures, or of everything in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.drawn import Drawings, show, written
from modelmill.cli.engine import ENGINE_HELP, CacheBuild, changed
from modelmill.cli.options import Common, borrow, config
from modelmill.cli.output import emit_json, note, progress
from modelmill.core.config import RunConfig, option
from modelmill.core.errors import RequestError, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

    from modelmill.segmenter import Segmenter
    from modelmill.vision.everything import Everything
    from modelmill.vision.prompts import Prompt
    from modelmill.vision.segment import Mask, Seen

HELP = "Segment pictures: masks of what points, boxes or a mask mark, or of everything in them."
MORE = """Coordinates are the picture's pixels, x from the left and y from the top. Without --single three masks answer
a prompt, best first; the overlay shows the best one. Each of several boxes is a prompt of its own.

Examples:

  modelmill segment sam.engine truck.jpg --point 500,375 -o truck.png

  modelmill segment sam.engine truck.jpg --box 425,600,700,875 --point 575,750 --label 0 --json

  modelmill segment sam.engine photos/ --everything -o masked/"""

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")

# flags of --everything → its fields
GRID = {
    "points_per_side": "points_per_side",
    "pred_iou_thresh": "pred_iou_thresh",
    "stability_score_thresh": "stability_score_thresh",
    "box_nms_thresh": "box_nms_thresh",
    "crop_layers": "crop_n_layers",
    "min_region": "min_mask_region_area",
}


@dataclass(frozen=True, kw_only=True)
class Args(Common):
    """One kind of question: prompts, or everything."""

    engine: Path = option(help=ENGINE_HELP, positional=True, metavar="ENGINE")
    images: tuple[Path, ...] = option(
        help="pictures, folders of pictures, or globs", positional=True, required=True, metavar="IMAGE…"
    )
    point: tuple[str, ...] = option((), "X,Y of a point (repeatable)", metavar="X,Y")
    label: tuple[int, ...] = option((), "1: the point is on the object, 0: it is not; one a point (default: 1)")
    box: tuple[str, ...] = option(
        (), "the object's box; several are several objects (repeatable)", metavar="X0,Y0,X1,Y1"
    )
    mask: Path | None = option(None, "picture of a rough mask, white is the object", metavar="FILE")
    single: bool = option(False, "one mask, for a prompt that is clear, instead of three", flags=("--single",))
    everything: bool = option(False, "segment all of each picture", flags=("--everything",))
    points_per_side: int = option(32, "for --everything: points of the grid on each side")
    pred_iou_thresh: float = option(0.88, "for --everything: masks of which the model expects less are left out")
    stability_score_thresh: float = option(0.95, "for --everything: masks with edges less steady are left out")
    box_nms_thresh: float = option(0.7, "for --everything: of masks whose boxes overlap by more the best stays")
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
    question = _question(args)
    paths = expand(args.images)
    several = len(paths) > 1
    rough = () if args.mask is None else (args.mask,)
    drawings = Drawings(args.output, args.masks, (*paths, *rough), several)
    with progress(f"opening {args.engine.name}", lines=True) as told:
        from modelmill.segmenter import Segmenter  # inside, since torch takes seconds to import

        segmenter = Segmenter(
            args.engine, device=args.device, threads=args.threads, progress=told, **changed(args.build)
        )
    results = []
    with progress("segmenting", quiet=not several and not args.everything, lines=True) as told:
        for result in answers(args, segmenter, paths, question, drawings, told):
            if not several and "error" in result:
                raise RequestError(result["error"])
            results.append(result)
            if "error" in result:
                note(result["error"])
    if args.json:
        emit_json({"engine": str(args.engine), "images": results} if several else results[0])
    else:
        show(results)
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


@dataclass(frozen=True)
class Question:
    """What is asked of each picture: prompts, in which ``mask`` has no logits yet, or everything."""

    prompts: tuple[Prompt, ...] = ()
    mask: Image | None = None
    everything: Everything | None = None


def _question(args: Args) -> Question:
    """Raises UsageError, RequestError, before anything is built or loaded."""
    asked = bool(args.point or args.box) or args.mask is not None
    if args.rle and not args.json:
        raise UsageError("--rle writes into the JSON: add --json")
    if args.batch < 1 or args.batch > 64:
        raise UsageError(f"--batch {args.batch} is outside 1…64")
    if args.everything:
        if asked or args.label or args.single:
            raise UsageError("--everything takes no point, label, box, mask or --single; leave one or the other out")
        from modelmill.vision.everything import Everything

        return Question(everything=Everything(**{field: getattr(args, flag) for flag, field in GRID.items()}))
    for each in fields(Args):
        if each.name in GRID and getattr(args, each.name) != each.default:
            raise UsageError(f"--{each.name.replace('_', '-')} belongs to --everything; leave it out, or ask for that")
    if not asked:
        raise UsageError("what is to be segmented? give --point X,Y, --box X0,Y0,X1,Y1, --mask FILE or --everything")
    return _prompts(args)


def _prompts(args: Args) -> Question:
    import torch

    from modelmill.vision.image import BLACK, open_image
    from modelmill.vision.prompts import make

    points = [numbers(text, 2, "--point", "X,Y") for text in args.point]
    boxes = [numbers(text, 4, "--box", "X0,Y0,X1,Y1") for text in args.box]
    if not points and args.label:
        raise UsageError("--label belongs to a --point, and there is none")
    if len(boxes) > 1:
        if points or args.mask is not None:
            raise UsageError(
                "each of several boxes is a prompt of its own: leave out --point and --mask, or all but one"
            )
        return Question(tuple(make(box=box) for box in boxes))
    # what is clear in the file of a mask is no object
    rough = None if args.mask is None else open_image(args.mask, behind=BLACK)
    stand_in = None if rough is None else torch.zeros(1, 1)
    return Question((make(points, args.label or None, boxes[0] if boxes else None, stand_in),), rough)


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


def answers(
    args: Args, segmenter: Segmenter, paths: list[Path], question: Question, drawings: Drawings,
    told: Callable[..., None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One result a picture, in order; pictures are read and seen a few at a time."""
    from modelmill.vision.image import open_image

    size = 1 if question.everything is not None else args.batch
    for start in range(0, len(paths), size):
        part, began = paths[start : start + size], time.perf_counter()
        pictures: list[Any] = []
        for path in part:
            try:
                pictures.append(open_image(path))
            except RequestError as error:
                pictures.append(error)
        good = [p for p in pictures if not isinstance(p, RequestError)]
        seen = iter(_seen(segmenter, good) if good and question.prompts else [None] * len(good))
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
                    masks = _masks(args, segmenter, picture, question, embedded, told)
                    took = share + time.perf_counter() - began  # to the masks; drawing them is not segmenting
                    result = written(drawings, path, picture, masks, question.prompts, args.rle)
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
    args: Args, segmenter: Segmenter, picture: Image, question: Question, seen: Seen | None, told: Callable[..., None]
) -> list[list[Mask]]:
    """Of each prompt, or of everything."""
    from dataclasses import replace

    from modelmill.vision.draw import as_prompt
    from modelmill.vision.prompts import check_inside

    if seen is None:
        return [segmenter.everything(picture, question.everything, progress=lambda done, of: told("points", done, of))]
    prompts = question.prompts
    for prompt in prompts:
        check_inside(prompt, picture.size)
    if question.mask is not None:
        image = segmenter.eye.image
        drawn = as_prompt(question.mask, seen.size, seen.fitted, image // 4, image)
        prompts = tuple(replace(prompt, mask=drawn) for prompt in prompts)
    return segmenter.predict_all(prompts, seen=seen, multimask=not args.single)
