"""The keys of ``modelmill serve``: flags, files, and which kind each is of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelmill.core.errors import UsageError

if TYPE_CHECKING:
    from modelmill.cli.serve import Args
    from modelmill.serve.access.key_policy import KeyPolicy


def read_api_admin_policy_keys(
    args: Args,
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[KeyPolicy, ...]]:
    """Return the API keys, the admin keys and the keys with policies.

    Raises:
        UsageError: a key is invalid or of two kinds, or a file cannot be read.
    """
    keys = _flag_and_file_keys(args.api_key, args.api_key_file, "--api-key")
    admin_keys = _flag_and_file_keys(args.admin_key, args.admin_key_file, "--admin-key")
    policies = _read_key_policies(args)
    named = {each.key for each in policies}
    if {*keys, *named} & set(admin_keys) or named & set(keys):
        raise UsageError(
            "a key is of two kinds (--api-key, --admin-key, --keys); use different ones"
        )
    return keys, admin_keys, policies


def _read_key_policies(args: Args) -> tuple[KeyPolicy, ...]:
    """Return the keys of --keys."""
    from modelmill.serve.access.key_policy import read_key_file

    if args.keys is None:
        return ()
    if args.ray:
        raise UsageError("--keys is not for --ray, whose replicas count separately")
    return read_key_file(args.keys)


def _flag_and_file_keys(options: Sequence[str], file: Path | None, flag: str) -> tuple[str, ...]:
    """Return the keys of a flag and of its file."""
    # spaces around a key are removed here and in the client's header
    keys = (*map(str.strip, options), *_read_key_file(file, f"{flag}-file"))
    if any(not key or not key.isascii() or not key.isprintable() for key in keys):
        kind = "API key" if flag == "--api-key" else "admin key"
        raise UsageError(f"an {kind} must be printable ASCII and not empty")
    return keys


def _read_key_file(file: Path | None, flag: str) -> list[str]:
    if file is None:
        return []
    try:
        lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        raise UsageError(f"{flag} {file} cannot be read") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"{flag} {file} holds no key")
    return keys
