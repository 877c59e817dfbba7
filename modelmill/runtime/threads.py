"""How many CPU threads to compute with: see ``device``."""

from modelmill.runtime.device import available_cores, use_threads

__all__ = ["available_cores", "use_threads"]
