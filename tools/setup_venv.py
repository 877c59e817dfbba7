"""Set up .venv: first torch (CPU build without a GPU), then modelmill with its constraints.

An open version range of torch would pull several gigabytes of CUDA packages onto a machine that
cannot use them. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_TORCH = "torch==2.13.0"


def main() -> int:
    """``create DIR`` or ``install DIR [EXTRAS]``."""
    if sys.version_info < (3, 11):  # noqa: UP036  it runs before the package's own check can
        print(
            f"modelmill needs Python 3.11 or newer, not {sys.version.split()[0]}; call make with "
            "PYTHON=python3.11"
        )
        return 1
    action, folder = sys.argv[1], Path(sys.argv[2])
    if action == "create":
        venv.create(folder, with_pip=True, symlinks=True)
        return 0
    extras = sys.argv[3] if len(sys.argv) > 3 else ""
    pip = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
    ]
    gpu = shutil.which("nvidia-smi") is not None
    extras_list = ",".join(filter(None, [extras, "gpu" if gpu else ""]))
    target = f"{ROOT}[{extras_list}]" if extras_list else str(ROOT)
    steps = [] if gpu else [[*pip, CPU_TORCH]]
    steps.append([*pip, "-c", str(ROOT / "constraints.txt"), "-e", target])
    print(
        f"setting up {folder} (Python {sys.version.split()[0]}) by pip: a minute or two, the "
        "first time",
        flush=True,
    )
    began, count = time.monotonic(), 0
    for step in steps:
        log = run_pip(step, began)
        if log is None:
            return 1
        count += sum(
            len(line.split()) - 2 for line in log if line.startswith("Successfully installed")
        )
    print(
        f"{folder} is ready: {count} packages installed in {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return 0


def run_pip(command: list[str], began: float) -> list[str] | None:
    """Run pip, with progress as one updated line on a terminal and as occasional lines elsewhere.

    Returns its output; None if it failed, after printing the error.
    """
    doing, ended, log = ["starting"], threading.Event(), list[str]()
    teller = threading.Thread(target=_report, args=(doing, ended, began), daemon=True)
    teller.start()
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                log.append(line.rstrip())
                doing[0] = pip_activity(line) or doing[0]
    finally:
        ended.set()
        teller.join()
    if pip.returncode == 0:
        return log
    errors = [line for line in log if line.startswith("ERROR")] or log[-5:]
    print(
        "\n".join(errors),
        f"\npip failed ({pip.returncode}): {' '.join(command[1:])}",
        file=sys.stderr,
    )
    return None


def pip_activity(line: str) -> str | None:
    """What a line of pip's says that it does now; None where it says nothing of that."""
    words = line.split()
    if not words:
        return None
    if words[0] == "Downloading" and len(words) > 1:
        size = line[line.rindex("(") :].strip() if "(" in line else ""
        return f"downloading {words[1].rpartition('/')[2].split('-')[0]} {size}".strip()
    if words[0] in ("Collecting", "Using") and len(words) > 1:
        return f"looking for {words[1]}" if words[0] == "Collecting" else None
    if line.startswith("Installing collected packages"):
        return f"installing {len(line.partition(':')[2].split(','))} packages"
    return None


def _report(doing: list[str], ended: threading.Event, began: float) -> None:
    moving, pause = sys.stdout.isatty(), 0.25 if sys.stdout.isatty() else 30.0
    while not ended.wait(pause):
        line = f"pip: {doing[0]}, {time.monotonic() - began:.0f} s"
        width = shutil.get_terminal_size().columns - 1
        sys.stdout.write(f"\r\x1b[K{line[:width]}" if moving else f"{line}\n")
        sys.stdout.flush()
        pause = pause if moving else 3 * pause
    if moving:
        sys.stdout.write("\r\x1b[K")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
