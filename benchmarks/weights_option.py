"""The option that chooses a weight format; it needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Collection


def add_weights_option(
    parser: argparse.ArgumentParser, formats: Collection[str], default: str
) -> None:
    """Add ``-q``/``--weights``: one of ``formats``."""
    parser.add_argument(
        "-q",
        "--weights",
        default=default,
        choices=formats,
        metavar="KIND",
        help=", ".join(formats),
    )
