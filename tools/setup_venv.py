"""Set up .venv: torch first and by its exact version where there is no GPU, then modelmill with its constraints.

An open version range of torch would pull several gigabytes of CUDA packages onto a machine that cannot use them.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_TORCH = "torch==2.13.0"


def main() -> int:
    """``create DIR`` or ``install DIR [EXTRAS]``."""
    if sys.version_info < (3, 11):  # noqa: UP036  it runs before the package's own check can
        print(f"modelmill needs Python 3.11 or newer, not {sys.version.split()[0]}; call make with PYTHON=python3.11")
        return 1
    action, folder = sys.argv[1], Path(sys.argv[2])
    if action == "create":
        venv.create(folder, with_pip=True, symlinks=True)
        return 0
    extras = sys.argv[3] if len(sys.argv) > 3 else ""
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    gpu = shutil.which("nvidia-smi") is not None
    if not gpu:
        subprocess.run([*pip, CPU_TORCH], check=True)
    wanted = ",".join(filter(None, [extras, "gpu" if gpu else ""]))
    target = f"{ROOT}[{wanted}]" if wanted else str(ROOT)
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), "-e", target], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
