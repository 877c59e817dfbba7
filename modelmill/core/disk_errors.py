"""What a disk, a folder or a file may have against being written or read: the user's to mend, and
one line.
"""

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
"""Errors that are no fault of ours wherever they come up."""


def describe_os_error(error: OSError) -> str | None:
    """One line for an error of the file system; None for one that may be a fault of ours."""
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
    way = (
        "free some space, or choose another place"
        if full
        else "see to its permissions, or choose another place"
    )
    return (
        f"{where}{error.strerror}; {way} (the cache is MODELMILL_CACHE, temporary files are in "
        "TMPDIR)"
    )
