"""What containers of several files have in common: the files, and the index that lists them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from modelmill.checkpoint.container import list_names
from modelmill.checkpoint.side_files import read_index
from modelmill.core.errors import CorruptCheckpoint


class ShardedFiles:
    """One or several files of tensors.

    expected: tensor name -> file name, as in an index; subclasses check it.
    """

    index_file: ClassVar[str]

    def __init__(self, paths: Sequence[Path], expected: Mapping[str, str] | None = None) -> None:  # noqa: ARG002
        self._paths = sorted(paths)
        self.metadata: dict[str, Any] = {}

    @classmethod
    def from_index(cls, folder: Path) -> Self:
        """Open all shards in the folder's index."""
        expected = read_index(folder / cls.index_file)
        return cls([folder / name for name in set(expected.values())], expected)

    def files(self) -> list[Path]:
        """Return the files that the tensors are read from."""
        return list(self._paths)

    def _check_listed(self, expected: Collection[str], names: Collection[str]) -> None:
        """Check that the shards hold every tensor of the index.

        Raises:
            CorruptCheckpoint: if one is absent.
        """
        absent = [name for name in expected if name not in names]
        if absent:
            index = self._paths[0].parent / self.index_file
            raise CorruptCheckpoint(
                f"{index}: lists {len(absent)} tensor(s) no shard holds: {list_names(absent)}"
            )
