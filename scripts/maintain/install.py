"""Installs a requirements file into the environment that runs this script: with uv, or with pip where uv cannot.

    .venv/bin/python scripts/maintain/install.py requirements.txt

uv takes a third of pip's time for the same pins. It is told to compile what it installs, as pip does: where
PYTHONDONTWRITEBYTECODE is set, as in many images, every process would compile torch and timm anew, which takes longer than
to import them. It reads none of pip's settings (a mirror in pip.conf, PIP_INDEX_URL), so it is handed them.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
UV_NAMES = {  # pip's setting -> uv's variable and how it joins several values
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
}


def main(requirements: str) -> int:
    """Returns the exit code of the installer that had the last word."""
    print(f"installing {requirements} (minutes and about 6 GB for the first one)", flush=True)
    pin = re.search(r"^uv==\S+", (ROOT / "requirements-dev.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pin is not None
    if subprocess.run([*PIP, "install", pin.group()], check=False).returncode == 0:
        listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False).stdout
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
        uv += ["--compile-bytecode", "-r", requirements]
        if subprocess.run(uv, env={**settings_for_uv(listed), **os.environ}, check=False).returncode == 0:
            return 0
        print("uv could not; pip tries", flush=True)
    return subprocess.run([*PIP, "install", "-r", requirements], check=False).returncode


def settings_for_uv(listed: str) -> dict[str, str]:
    """uv's variables for what `pip config list` shows, lines such as `global.index-url='https://…'`."""
    found: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in UV_NAMES:
            variable, separator = UV_NAMES[name]
            words = str(ast.literal_eval(value)).split()
            found[variable] = separator.join(filter(None, [found.get(variable, ""), *words]))
    if "UV_INDEX" in found:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # as pip: the best version of any index
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
