"""The tree of all errors that a user can see.

::

    ModelmillError                 one line: what was wrong, what to do
    ├── UsageError                 a flag, an argument or a combination that makes no sense (a ValueError)
    │   ├── RequestError           one request is invalid or impossible; the engine continues
    │   │   └── PromptTooLong      its prompt is longer than what the engine takes
    │   └── UnknownOption          a keyword that a modelmill class does not have (also a TypeError)
    ├── CheckpointError            a checkpoint cannot be used
    │   ├── CorruptCheckpoint      a file contradicts itself, is truncated, or holds NaN/Inf
    │   ├── TensorMismatch         tensors missing or left over, or of the wrong shape or dtype
    │   └── UnknownArchitecture    no model family of modelmill computes this
    ├── TokenizerError             tokenizer missing, broken, or not matching the model
    │   └── TemplateError          a chat template fails, loops or exceeds its limits
    ├── ArtifactError              an engine folder cannot be used
    │   ├── CorruptArtifact        a file is missing or its sha256 differs
    │   └── IncompatibleArtifact   another schema or packing; rebuild
    ├── AcceptanceError            the built engine does not compute what the checkpoint computes
    ├── CapacityError              it does not fit: memory, length, batch
    ├── RankError                  one of several ranks has ended; the engine must be opened again
    └── MissingDependency          a package, compiler or device is absent

A user's mistake raises one of these and the command line prints its single line. Anything else is a
bug of modelmill and keeps its traceback.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass


class ModelmillError(Exception):
    """Base of all errors that are meant for the user."""


class UsageError(ModelmillError, ValueError):
    """A flag, an argument or a combination of them makes no sense."""


class RequestError(UsageError):
    """A single request is invalid or impossible; the engine continues."""

    def reworded(self, message: str) -> RequestError:
        """The same error in other words, such as those of another API."""
        return RequestError(message)


@dataclass(frozen=True)
class PromptTokenCounts:
    """Tokens of a prompt that is too long.

    Attributes:
        prompt: tokens that it has.
        limit: tokens that it may have.
        counts_all: False if it has more than ``prompt``: counting ended there.
    """

    prompt: int
    limit: int
    counts_all: bool = True


class PromptTooLong(RequestError):
    """A prompt is longer than what the engine takes.

    Attributes:
        counts: its tokens; None if it was refused by its characters, before it had tokens.
    """

    def __init__(self, message: str, counts: PromptTokenCounts | None = None) -> None:
        super().__init__(message)
        self.counts = counts

    def reworded(self, message: str) -> PromptTooLong:
        """See ``RequestError.reworded``."""
        return PromptTooLong(message, self.counts)


class UnknownOption(UsageError, TypeError):
    """A keyword argument that a class of the Python API does not have."""


GRAMMAR_TOO_COSTLY_MESSAGE = (
    "the answer could not be held to its grammar any further: too much work; ask for a simpler one"
)


class CheckpointError(ModelmillError):
    """A checkpoint cannot be used."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint file contradicts itself, is truncated, or holds NaN or Inf."""


class TensorMismatch(CheckpointError):
    """Tensors are missing, left over, or have the wrong shape or dtype."""


class UnknownArchitecture(CheckpointError):
    """No model family of modelmill computes what this checkpoint describes."""


class TokenizerError(ModelmillError):
    """A tokenizer is missing, broken or does not belong to the model."""


class TemplateError(TokenizerError):
    """A chat template is invalid, loops, or exceeds its limits."""


class ArtifactError(ModelmillError):
    """An engine folder cannot be used."""


class CorruptArtifact(ArtifactError):
    """A file of the engine is missing or its sha256 differs from the manifest."""


class IncompatibleArtifact(ArtifactError):
    """The engine has another schema or packing; it must be rebuilt."""


class AcceptanceError(ModelmillError):
    """The built engine does not compute what its checkpoint computes."""


class CapacityError(ModelmillError):
    """Something does not fit: memory, length or batch."""


class RankError(ModelmillError):
    """A rank of a tensor-parallel engine has ended: the engine must be opened again."""


class MissingDependency(ModelmillError):
    """A required package, compiler or device is missing."""
