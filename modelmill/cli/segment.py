"""``modelmill segment``: masks of prompted objects in pictures, or of everything in them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.engine_options import ENGINE_HELP, ImplicitBuildOptions, resolve_or_pull_model
from modelmill.cli.options import CommonArgs, config_field, inherit_option
from modelmill.cli.output import print_json, print_note, show_progress
from modelmill.cli.segment_output import (
    SegmentOutputPaths,
    show_segment_results,
    write_segment_result,
)
from modelmill.core.config import RunConfig, non_default_fields, option_field, path_option_field
from modelmill.core.errors import RequestError, UsageError
from modelmill.core.progress_callback import Progress

if TYPE_CHECKING:
    from PIL.Image import Image

    from modelmill.segmenter import Segmenter
    from modelmill.vision.automatic_mask_options import AutomaticMaskOptions
    from modelmill.vision.prompts import Prompt
    from modelmill.vision.sam_model import ImageEmbedding, Mask

HELP = "Segment pictures: masks of what points, boxes or a mask mark, or of everything in them."
EPILOG = """Coordinates are the picture's pixels, x from the left and y from the top. Without --single three masks
answer a prompt, best first; the overlay shows the best one. Each of several boxes is a prompt of its own.

Examples:

  modelmill segment sam.engine truck.jpg --point 500,375 -o truck.png

  modelmill segment sam.engine truck.jpg --box 425,600,700,875 --point 575,750 --label 0 --json

  modelmill segment sam.engine photos/ --everything -o masked/"""  # noqa: E501

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")

# flags of --everything → its fields
AUTOMATIC_MASK_FIELD_BY_OPTION = {
    "points_per_side": "points_per_side",
    "pred_iou_thresh": "pred_iou_thresh",
    "stability_score_thresh": "stability_score_thresh",
    "box_nms_thresh": "box_nms_thresh",
    "crop_layers": "crop_n_layers",
    "min_region": "min_mask_region_area",
}


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Options of ``segment``: prompts, or everything."""

    engine: Path = option_field(help=ENGINE_HELP, positional=True, metavar="ENGINE")
    images: tuple[Path, ...] = option_field(
        help="pictures, folders of pictures, or globs",
        positional=True,
        required=True,
        metavar="IMAGE…",
    )
    point: tuple[str, ...] = option_field((), "X,Y of a point (repeatable)", metavar="X,Y")
    label: tuple[int, ...] = option_field(
        (), "1: the point is on the object, 0: it is not; one a point (default: 1)"
    )
    box: tuple[str, ...] = option_field(
        (), "the object's box; several are several objects (repeatable)", metavar="X0,Y0,X1,Y1"
    )
    mask: Path | None = path_option_field("picture of a rough mask, white is the object", "FILE")
    single: bool = option_field(
        False, "one mask, for a prompt that is clear, instead of three", flags=("--single",)
    )
    everything: bool = option_field(False, "segment all of each picture", flags=("--everything",))
    points_per_side: int = option_field(32, "for --everything: points of the grid on each side")
    pred_iou_thresh: float = option_field(
        0.88, "for --everything: masks of which the model expects less are left out"
    )
    stability_score_thresh: float = option_field(
        0.95, "for --everything: masks with edges less steady are left out"
    )
    box_nms_thresh: float = option_field(
        0.7, "for --everything: of masks whose boxes overlap by more the best stays"
    )
    crop_layers: int = option_field(
        0, "for --everything: look again at 4, 16, … parts of the picture"
    )
    min_region: int = option_field(
        0, "for --everything: fill holes and drop islands of fewer pixels"
    )
    output: Path | None = option_field(
        None, "picture with the masks drawn over it; for several pictures a folder",
        flags=("-o", "--output"),
        metavar="OUT.png",
    )  # fmt: skip
    masks: Path | None = path_option_field(
        "folder for every mask as a black and white PNG", "FOLDER"
    )
    rle: bool = option_field(
        False, "with --json: the masks' pixels as COCO run lengths", flags=("--rle",)
    )
    batch: int = option_field(4, "pictures that the encoder sees at a time")
    build: ImplicitBuildOptions = config_field(
        ImplicitBuildOptions, "A checkpoint in the engine's place"
    )
    device: str = inherit_option(RunConfig, "device")
    threads: int | None = inherit_option(RunConfig, "threads")


def run(args: Args) -> int:
    """Segment pictures; exit code 1 if one of several could not be read (a single one raises)."""
    query = _make_segment_query(args)
    paths = expand_image_paths(args.images)
    several = len(paths) > 1
    if not any(path.exists() for path in paths):  # before a checkpoint is built
        raise UsageError(f"{paths[0]}: there is no such file; give the path of a picture")
    rough = () if args.mask is None else (args.mask,)
    outputs = SegmentOutputPaths(args.output, args.masks, (*paths, *rough), several)
    engine = resolve_or_pull_model(args.engine)
    with show_progress(f"opening {engine.name}", lines=True) as on_progress:
        from modelmill.segmenter import Segmenter  # inside, since torch takes seconds to import

        segmenter = Segmenter(
            engine,
            device=args.device,
            threads=args.threads,
            progress=on_progress,
            **non_default_fields(args.build),
        )
    results = []
    with show_progress(
        "segmenting", quiet=not several and not args.everything, lines=True
    ) as on_progress:
        for result in segment_images(args, segmenter, paths, query, outputs, on_progress):
            if not several and "error" in result:
                raise RequestError(result["error"])
            results.append(result)
            if "error" in result:
                print_note(result["error"])
    if args.json:
        print_json({"engine": str(args.engine), "images": results} if several else results[0])
    else:
        show_segment_results(results)
    return 1 if any("error" in result for result in results) else 0


def expand_image_paths(patterns: tuple[Path, ...]) -> list[Path]:
    """Expand paths, folders (their pictures, sorted by name) and globs to files.

    Raises:
        UsageError: if a folder has no pictures or a glob matches no file.
    """
    paths: list[Path] = []
    for path in patterns:
        if path.is_dir():
            inside = sorted(
                p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file()
            )
            if not inside:
                raise UsageError(
                    f"{path}: there are no pictures in this folder ({', '.join(IMAGE_SUFFIXES)})"
                )
            paths += inside
        elif path.exists() or not any(c in str(path) for c in "*?["):
            paths.append(path)
        else:
            matches = sorted(_glob_files(path))
            if not matches:
                raise UsageError(f"{path}: no file matches")
            paths += matches
    return list(dict.fromkeys(paths))


def _glob_files(path: Path) -> Iterator[Path]:
    import glob

    return (Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())


@dataclass(frozen=True)
class SegmentQuery:
    """The prompts for each picture (``mask`` is not converted to logits yet), or everything."""

    prompts: tuple[Prompt, ...] = ()
    mask: Image | None = None
    everything: AutomaticMaskOptions | None = None


def _make_segment_query(args: Args) -> SegmentQuery:
    """Check the prompts before anything is built or loaded.

    Raises:
        UsageError: if options exclude each other or there is no prompt.
        RequestError: if a prompt is invalid.
    """
    has_prompt = bool(args.point or args.box) or args.mask is not None
    if args.rle and not args.json:
        raise UsageError("--rle writes into the JSON: add --json")
    if args.batch < 1 or args.batch > 64:
        raise UsageError(f"--batch must be between 1 and 64, not {args.batch}")
    if args.everything:
        if has_prompt or args.label or args.single:
            raise UsageError(
                "--everything takes no point, label, box, mask or --single; leave one or the "
                "other out"
            )
        from modelmill.vision.automatic_mask_options import AutomaticMaskOptions

        return SegmentQuery(
            everything=AutomaticMaskOptions(
                **{
                    field: getattr(args, flag)
                    for flag, field in AUTOMATIC_MASK_FIELD_BY_OPTION.items()
                }
            )
        )
    for each in fields(Args):
        if each.name in AUTOMATIC_MASK_FIELD_BY_OPTION and getattr(args, each.name) != each.default:
            raise UsageError(
                f"--{each.name.replace('_', '-')} belongs to --everything; leave it out or "
                "add --everything"
            )
    if not has_prompt:
        raise UsageError(
            "there is no prompt: give --point X,Y, --box X0,Y0,X1,Y1, --mask FILE or --everything"
        )
    return _make_prompt_query(args)


def _make_prompt_query(args: Args) -> SegmentQuery:
    import torch

    from modelmill.vision.image import BLACK_BACKGROUND, open_image
    from modelmill.vision.prompts import make_prompt

    points = [parse_numbers(text, 2, "--point", "X,Y") for text in args.point]
    boxes = [parse_numbers(text, 4, "--box", "X0,Y0,X1,Y1") for text in args.box]
    if not points and args.label:
        raise UsageError("--label belongs to a --point, and there is none")
    if len(boxes) > 1:
        if points or args.mask is not None:
            raise UsageError(
                "each of several boxes is a prompt of its own: leave out --point and --mask, or "
                "all but one"
            )
        return SegmentQuery(tuple(make_prompt(box=box) for box in boxes))
    # transparent pixels of a mask file are not the object
    rough = None if args.mask is None else open_image(args.mask, background=BLACK_BACKGROUND)
    stand_in = None if rough is None else torch.zeros(1, 1)
    return SegmentQuery(
        (make_prompt(points, args.label or None, boxes[0] if boxes else None, stand_in),), rough
    )


def parse_numbers(text: str, count: int, flag: str, metavar: str) -> list[float]:
    """Parse comma-separated numbers.

    Raises:
        UsageError: if the text has another form.
    """
    parts = text.replace(" ", "").split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) != count:
        raise UsageError(f"{flag} takes {metavar}, not {text[:80]!r}")
    return numbers


def segment_images(
    args: Args, segmenter: Segmenter, paths: list[Path], query: SegmentQuery,
    outputs: SegmentOutputPaths,
    on_progress: Progress,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield one result per picture, in order; pictures are read and encoded in small batches."""
    from modelmill.vision.image import open_image

    size = 1 if query.everything is not None else args.batch
    for start in range(0, len(paths), size):
        part, began = paths[start : start + size], time.perf_counter()
        pictures: list[Any] = []
        for path in part:
            try:
                pictures.append(open_image(path))
            except RequestError as error:
                pictures.append(error)
        good = [p for p in pictures if not isinstance(p, RequestError)]
        embeddings = iter(
            _embed_images(segmenter, good) if good and query.prompts else [None] * len(good)
        )
        share = (time.perf_counter() - began) / len(part)
        for index, (path, picture) in enumerate(zip(part, pictures, strict=True)):
            began = time.perf_counter()
            if isinstance(picture, RequestError):
                yield {"image": str(path), "error": str(picture)}
            else:
                try:
                    embedded = next(embeddings)
                    if isinstance(embedded, RequestError):
                        raise RequestError(f"{path}: {embedded}")
                    masks = _predict_masks(args, segmenter, picture, query, embedded, on_progress)
                    # without drawing and writing the masks
                    took = share + time.perf_counter() - began
                    result = write_segment_result(
                        outputs, path, picture, masks, query.prompts, args.rle
                    )
                    yield {**result, "seconds": round(took, 4)}
                except RequestError as error:
                    yield {"image": str(path), "error": str(error)}
            on_progress("segmenting", start + index + 1, len(paths))


def _embed_images(segmenter: Segmenter, pictures: list[Any]) -> list[ImageEmbedding | RequestError]:
    """Embed several pictures in one batch; if that fails, one by one, with each one's error."""
    embeddings: list[ImageEmbedding | RequestError] = []
    try:
        embeddings += segmenter.embed_images(pictures)
    except RequestError as error:
        if len(pictures) == 1:
            return [error]
        for picture in pictures:
            embeddings += _embed_images(segmenter, [picture])
    return embeddings


def _predict_masks(
    args: Args,
    segmenter: Segmenter,
    picture: Image,
    query: SegmentQuery,
    embedding: ImageEmbedding | None,
    on_progress: Progress,
) -> list[list[Mask]]:
    """Return the masks of each prompt, or of everything."""
    from dataclasses import replace

    from modelmill.vision.draw import mask_prompt_logits
    from modelmill.vision.prompts import check_prompt_inside_image

    if embedding is None:
        return [segmenter.everything(picture, query.everything, progress=on_progress)]
    prompts = query.prompts
    for prompt in prompts:
        check_prompt_inside_image(prompt, picture.size)
    if query.mask is not None:
        image = segmenter.model.image_size
        drawn = mask_prompt_logits(
            query.mask, embedding.size, embedding.encoder_size, image // 4, image
        )
        prompts = tuple(replace(prompt, mask=drawn) for prompt in prompts)
    return segmenter.predict_all(prompts, embedding=embedding, multimask=not args.single)
