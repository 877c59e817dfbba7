"""Which rows of results/quantization.jsonl are of the measurement that is asked for.

Names alone do not tell: the same options with another calibration file, text or device are another
measurement, and a row without the summaries that are asked for is not all of it. Rows that were
written when the key held names and options only are told apart by what else they say.
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
    """(the key of the row that is asked for, the rows that have all of it).

    A row that stands for another, measured again or with its summaries, has its key: a report has
    one line for both."""
    key, names = row_key(options, build), option_names(options, build)
    named = (row for row in rows if row.get("names", row["key"]) == names)
    same = [row for row in rows if row["key"] == key] or [
        row for row in named if is_same_measurement(row, options, build)
    ]
    # which a report shows
    newest = [row for row in rows if row["key"] == same[-1]["key"]][-1:] if same else []
    found = same[-1]["key"] if newest and newest[0] is same[-1] else key
    return found, [row for row in same if has_summaries(row, options)]


def row_key(options: argparse.Namespace, build: Sequence[str]) -> str:
    """What makes two rows the same measurement: names and options, what the files hold, and the
    device.
    """
    files = option_file_digests([str(options.text), *calibration_options(options, build), *build])
    return _digest([*_names(options, build), *files, requested_device(options)])


def option_names(options: argparse.Namespace, build: Sequence[str]) -> str:
    """The names and options alone, which once were a row's key; ``alike`` tells the rest of such
    rows.
    """
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
    """Whether a row of the same names is of the same device, text and calibration, as far as it
    tells.
    """
    words = [*calibration_options(options, build), *build]
    given = words[words.index("--calibration") + 1] if "--calibration" in words[:-1] else None
    read = row.get("calibration")
    if read is None and not row.get("accepted") and "names" in row:
        # refused with this calibration; without one the recipe takes none, and any other is alike
        return False
    named = read is None or (given is not None and read["name"] == Path(given).name)
    held = read is None or read.get("sha256") in (None, *option_file_digests([given or ""]))
    text = row.get("text_sha256") in (None, *option_file_digests([str(options.text)]))
    return named and held and text and without_threads(row["device"]) == requested_device(options)


def has_summaries(row: Row, options: argparse.Namespace) -> bool:
    """Whether a row tells the ROUGE that is asked for; a refused build has none to tell."""
    wanted = rouge_articles(options)
    if wanted is None or not row.get("accepted"):
        return True
    return row.get("articles", wanted) == wanted and row.get("summaries") == min(
        options.num, wanted["items"]
    )


def requested_device(options: argparse.Namespace) -> str:
    """The name of the GPU or CPU that is asked for; how many threads changes a row's seconds, and
    not what it says.
    """
    from modelmill.eval.report import device_name
    from modelmill.runtime.device import pick_device

    return without_threads(device_name(pick_device(options.device)))


def without_threads(device: str) -> str:
    """A row's device without its threads."""
    return re.sub(r", \d+ threads$", "", device)


def rouge_articles(options: argparse.Namespace) -> Row | None:
    """What is summarized, where ROUGE is asked for and measured."""
    if options.summaries is None or options.whole_inputs:
        return None
    lines = [line for line in options.summaries.read_bytes().splitlines() if line.strip()]
    return {"sha256": option_file_digests([str(options.summaries)])[0], "items": len(lines)}


def calibration_options(options: argparse.Namespace, build: Sequence[str]) -> Sequence[str]:
    """--calibration for the build: ours, or the file beside the text; recipes without statistics do
    not read it.
    """
    if "--calibration" in build or not build:
        return ()
    beside = options.calibration or options.text.with_name(CALIBRATION)
    return ("--calibration", str(beside)) if beside.is_file() else ()
