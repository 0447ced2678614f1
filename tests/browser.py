"""A real browser without a window."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def drawn(address: str, folder: Path) -> str:
    """The document as Chromium has it once the page has drawn itself, up to its data and its script."""
    return dumped(address, folder)[0].split("<script")[0]


def dumped(address: str, folder: Path) -> tuple[str, str]:
    """The whole document once the page has drawn itself, and what its console said."""
    quiet = ("quic", "background-networking", "component-update", "sync", "gpu")
    flags = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{part}" for part in quiet)]
    flags += ["--enable-logging=stderr", f"--user-data-dir={folder}", "--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run([str(CHROMIUM), *flags, address], check=True, capture_output=True, text=True, timeout=120)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
