"""How many KV pages a sequence needs in layers that attend to a window."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence


def max_sequence_pages(tokens: int, page_size: int, window: int | None, step_tokens: int) -> int:
    """Most pages that a sequence of ``tokens`` tokens uses at once.

    Args:
        tokens: Its length.
        page_size: Tokens of a page.
        window: Tokens that a query attends to in these layers; None: all, so that no page is freed.
        step_tokens: Most tokens that one step computes of it.
    """
    pages = -(-tokens // page_size)
    if window is None:
        return pages
    # two tokens that are sampled but not read yet may delay the release of a page
    return min(pages, -(-(window + step_tokens + 1) // page_size) + 1)


def max_sequence_pages_in_groups(
    tokens: int, page_size: int, windows: Iterable[int | None], step_tokens: int
) -> int:
    """As ``max_sequence_pages``, in all page groups together; windows: of each group."""
    return sum(max_sequence_pages(tokens, page_size, window, step_tokens) for window in windows)


def max_fitting_length(
    max_tokens: int,
    page_size: int,
    windows: Sequence[int | None],
    step_tokens: int,
    pages: int,
) -> int:
    """Tokens of the longest sequence, in full pages, that ``pages`` are enough for.

    Args:
        max_tokens: The most that it may have.
        page_size: As of ``max_sequence_pages_in_groups``.
        windows: As of ``max_sequence_pages_in_groups``.
        step_tokens: As of ``max_sequence_pages_in_groups``.
        pages: Of all page groups together.

    Returns:
        At most ``max_tokens``; 0 where nothing fits.
    """
    lengths = range(0, max_tokens + 1, page_size)
    # max_sequence_pages_in_groups grows with the length
    fits = bisect_right(
        lengths,
        pages,
        key=lambda tokens: max_sequence_pages_in_groups(tokens, page_size, windows, step_tokens),
    )
    return lengths[fits - 1] if fits else 0


def max_pages_between_steps(tokens: int, page_size: int, window: int | None) -> int:
    """Most pages that a sequence uses, apart from ``max_extra_step_pages``.

    Sequences that share a step share its tokens, so that n of them never use more pages than n
    times as many and ``max_extra_step_pages`` once.

    Args:
        tokens: Its length.
        page_size: Tokens of a page.
        window: As of ``max_sequence_pages``.
    """
    pages = -(-tokens // page_size)
    if window is None:
        return pages
    # one more than behind the window: the tokens of a step may begin inside a page
    return min(pages, -(-(window + 1) // page_size) + 2)


def max_extra_step_pages(step_tokens: int, page_size: int, window: int | None) -> int:
    """Pages of a step's tokens, which windows let a sequence free once they are computed."""
    return 0 if window is None else -(-step_tokens // page_size)


def first_page_in_use(computed: int, page_size: int, window: int | None) -> int:
    """The first page that a query behind ``computed`` tokens reads."""
    if window is None or not computed:
        return 0
    # not the page behind the last one, which a window of one token would give
    return min(max(computed - window + 1, 0), computed - 1) // page_size
