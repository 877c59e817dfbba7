"""Every error a user can meet, drawn as a tree.

::

    ModelmillError                 one line: what was wrong, what to do
    ├── UsageError                 a flag, an argument or a combination that makes no sense (a ValueError)
    │   ├── RequestError           one request asks for something impossible; the engine goes on
    │   └── UnknownOption          a keyword that a class of ours does not know (a TypeError as well)
    ├── CheckpointError            a checkpoint cannot be used
    │   ├── CorruptCheckpoint      a file lies about itself, is truncated, or holds NaN/Inf
    │   ├── TensorMismatch         tensors missing or left over, or of the wrong shape or dtype
    │   └── UnknownArchitecture    no family of ours computes this
    ├── TokenizerError             tokenizer missing, broken, or not matching the model
    │   └── TemplateError          a chat template fails, loops or writes without end
    ├── ArtifactError              an engine folder cannot be used
    │   ├── CorruptArtifact        a file is missing or its sha256 differs
    │   └── IncompatibleArtifact   another schema or packing; rebuild
    ├── AcceptanceError            the built engine does not compute what the checkpoint computes
    ├── CapacityError              it does not fit: memory, length, batch
    ├── RankError                  one of several ranks has ended; the engine is over
    └── MissingDependency          a package, compiler or device is absent

A user's mistake raises one of these and the command line prints its single line. Anything else is a
bug
of ours and keeps its traceback.
"""  # noqa: E501

from __future__ import annotations


class ModelmillError(Exception):
    """Base of all errors that are meant for the user."""


class UsageError(ModelmillError, ValueError):
    """A flag, an argument or a combination of them makes no sense."""


class RequestError(UsageError):
    """A single request is impossible; the engine is unharmed."""


class UnknownOption(UsageError, TypeError):
    """A keyword argument that a class for Python does not know."""


GRAMMAR_LOST = (
    "the answer could not be held to its grammar any further: too much work; ask for a simpler one"
)


class CheckpointError(ModelmillError):
    """A checkpoint cannot be used."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint file contradicts itself, is truncated, or holds NaN or Inf."""


class TensorMismatch(CheckpointError):
    """Tensors are missing, left over, or have the wrong shape or dtype."""


class UnknownArchitecture(CheckpointError):
    """No model family of ours computes what this checkpoint describes."""


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
    """One of the processes that compute a model together has ended: the engine must be opened
    again.
    """


class MissingDependency(ModelmillError):
    """A package, compiler or device that is needed here is absent."""
