"""File system errors that the user can fix, described in one line."""

from __future__ import annotations

import errno

USER_FIXABLE_ERRNOS = frozenset(
    {
        *(
            errno.EACCES,
            errno.EPERM,
            errno.EROFS,
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EFBIG,
            errno.EIO,
        ),
        *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST, errno.ESTALE),
    }
)
"""Errors that are never a bug of modelmill, wherever they occur."""


def describe_user_fixable_os_error(error: OSError) -> str | None:
    """Describe a file system error in one line; None for one that may be a bug of modelmill."""
    if isinstance(error, FileNotFoundError):
        if "temporary directory" in str(error):
            return (
                "no folder for temporary files can be written; free some space, or name one in "
                "TMPDIR"
            )
        return (
            None
            if error.filename is not None
            else "the folder you are in is gone; change to another one"
        )
    if error.errno not in USER_FIXABLE_ERRNOS:
        return None
    where = f"{error.filename}: " if error.filename is not None else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = (
        "free some space, or choose another place"
        if full
        else "check its permissions, or choose another place"
    )
    return (
        f"{where}{error.strerror}; {remedy} (the cache is MODELMILL_CACHE, temporary files are in "
        "TMPDIR)"
    )
