"""Find the rows of results/quantization.jsonl that belong to a requested measurement.

Names are not enough: the same options with another calibration file, text or device are another
measurement, and a row without the requested summaries is incomplete. Older rows, whose key has only
names and options, are distinguished by their other fields.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_cache import option_file_digests

CALIBRATION = "cnndm_calibration.jsonl"
Row = dict[str, Any]


def matching_rows(
    rows: Sequence[Row], options: argparse.Namespace, build: Sequence[str]
) -> tuple[str, list[Row]]:
    """Return the key of the requested row, and the rows that contain all of it.

    A row that stands for another, measured again or with its summaries, has its key: a report has
    one line for both.
    """
    key, names = row_key(options, build), option_names(options, build)
    named = (row for row in rows if row.get("names", row["key"]) == names)
    same = [row for row in rows if row["key"] == key] or [
        row for row in named if is_same_measurement(row, options, build)
    ]
    # which a report shows
    newest = [row for row in rows if row["key"] == same[-1]["key"]][-1:] if same else []
    matched_key = same[-1]["key"] if newest and newest[0] is same[-1] else key
    return matched_key, [row for row in same if has_summaries(row, options)]


def row_key(options: argparse.Namespace, build: Sequence[str]) -> str:
    """Return the identity of a measurement: names, options, file digests, and the device."""
    files = option_file_digests([str(options.text), *calibration_options(options, build), *build])
    return _digest([*_names(options, build), *files, requested_device(options)])


def option_names(options: argparse.Namespace, build: Sequence[str]) -> str:
    """Return names and options only, a row's former key; see ``is_same_measurement``."""
    return _digest(_names(options, build))


def _names(options: argparse.Namespace, build: Sequence[str]) -> list[object]:
    parts = [
        options.checkpoint.name,
        *build,
        options.text.name,
        options.tokens,
        options.window,
        options.kv_cache_dtype,
    ]
    return parts + ["whole inputs"] * options.whole_inputs


def _digest(parts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(list(map(str, parts))).encode()).hexdigest()[:12]


def is_same_measurement(row: Row, options: argparse.Namespace, build: Sequence[str]) -> bool:
    """Return whether a row of the same names has the same device, text and calibration."""
    words = [*calibration_options(options, build), *build]
    calibration_file = (
        words[words.index("--calibration") + 1] if "--calibration" in words[:-1] else None
    )
    read = row.get("calibration")
    if read is None and not row.get("accepted") and "names" in row:
        # refused with this calibration; without one the recipe takes none, and any other is alike
        return False
    named = read is None or (
        calibration_file is not None and read["name"] == Path(calibration_file).name
    )
    same_calibration = read is None or read.get("sha256") in (
        None,
        *option_file_digests([calibration_file or ""]),
    )
    text = row.get("text_sha256") in (None, *option_file_digests([str(options.text)]))
    return (
        named
        and same_calibration
        and text
        and without_threads(row["device"]) == requested_device(options)
    )


def has_summaries(row: Row, options: argparse.Namespace) -> bool:
    """Return whether a row has the requested ROUGE; a refused build needs none."""
    articles = rouge_articles(options)
    if articles is None or not row.get("accepted"):
        return True
    return row.get("articles", articles) == articles and row.get("summaries") == min(
        options.num, articles["items"]
    )


def requested_device(options: argparse.Namespace) -> str:
    """Return the requested GPU's or CPU's name; the thread count affects only a row's seconds."""
    from modelmill.eval.report import device_name
    from modelmill.loader.device import resolve_device

    return without_threads(device_name(resolve_device(options.device)))


def without_threads(device: str) -> str:
    """A row's device without its threads."""
    return re.sub(r", \d+ threads$", "", device)


def rouge_articles(options: argparse.Namespace) -> Row | None:
    """Return the digest of the articles if ROUGE is requested and measured."""
    if options.summaries is None or options.whole_inputs:
        return None
    lines = [line for line in options.summaries.read_bytes().splitlines() if line.strip()]
    return {"sha256": option_file_digests([str(options.summaries)])[0], "items": len(lines)}


def calibration_options(options: argparse.Namespace, build: Sequence[str]) -> Sequence[str]:
    """Return --calibration for the build: modelmill's, or the file beside the text.

    Recipes without statistics do not read it.
    """
    if "--calibration" in build or not build:
        return ()
    beside = options.calibration or options.text.with_name(CALIBRATION)
    return ("--calibration", str(beside)) if beside.is_file() else ()
