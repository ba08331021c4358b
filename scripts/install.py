"""Install a requirements file into the environment of the Python that runs this script. The script
uses uv, or pip if uv fails.

    .venv/bin/python scripts/install.py requirements.lock

A file that ends in .lock lists the hashes of all packages. The installer then refuses a package
with another hash, and a package that the lock does not list. The script refuses a lock that does
not fit requirements.txt.

uv takes a third of pip's time for the same versions. Like pip, it compiles the packages when it
installs them. Many container images set PYTHONDONTWRITEBYTECODE. There, every process would
otherwise compile torch and timm again, which takes longer than importing them. uv does not read the
settings of pip (a mirror in pip.conf, PIP_INDEX_URL), so this script passes them to uv.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
# Dictionary from a setting of pip to the environment variable that uv reads, and the separator of
# several values in it.
UV_NAMES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
}


def main(requirements: str) -> int:
    """Install a requirements file with uv, or with pip if uv fails. Return the exit code of the
    last installer, or 2 if the lock is outdated.
    """
    install = ["install", "-r", requirements]
    if requirements.endswith(".lock"):
        source = Path(requirements).with_suffix(".txt")
        missing = out_of_step(
            source.read_text(encoding="utf-8"), Path(requirements).read_text(encoding="utf-8")
        )
        if missing:
            print(
                f"{requirements}: does not fit {source} ({', '.join(missing)}); run make lock",
                file=sys.stderr,
            )
            return 2
        install.append("--require-hashes")
    print(f"installing {requirements} (minutes and about 6 GB for the first one)", flush=True)
    pin = re.search(
        r"^uv==\S+", (ROOT / "requirements-dev.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert pin is not None
    if subprocess.run([*PIP, "install", pin.group()], check=False).returncode == 0:
        listed = subprocess.run(
            [*PIP, "config", "list"], capture_output=True, text=True, check=False
        ).stdout
        uv = [
            sys.executable,
            "-m",
            "uv",
            "pip",
            *install,
            "--quiet",
            "--python",
            sys.executable,
            "--compile-bytecode",
        ]
        if (
            subprocess.run(
                uv, env={**settings_for_uv(listed), **os.environ}, check=False
            ).returncode
            == 0
        ):
            return 0
        print("uv failed; trying pip", flush=True)
    return subprocess.run([*PIP, *install], check=False).returncode


def out_of_step(requirements: str, lock: str) -> list[str]:
    """Return the requirements that the lock file does not fulfill: it lacks the package, or lists
    another version or several versions.
    """
    versions: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([\w.+!-]+)", lock, re.MULTILINE):
        versions.setdefault(_canonical(name), set()).add(version)
    # A file in the project, such as ./vendor/x.whl, has the same line in the lock.
    missing = [
        line
        for line in re.findall(r"^\./\S+", requirements, re.MULTILINE)
        if f"{line} \\\n" not in lock
    ]
    for line in requirements.splitlines():
        required = re.match(r"(\w[\w.-]*)(?:\[.*\])?(?:==([\w.+!-]+))?", line)
        if required is not None:
            known = versions.get(_canonical(required[1]), set())
            if not known or (required[2] and known != {required[2]}):
                missing.append(line.partition(" ")[0])
    return missing


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def settings_for_uv(listed: str) -> dict[str, str]:
    """Convert the settings of pip to environment variables for uv. The input is the output of `pip
    config list`, such as `global.index-url='https://…'`.
    """
    variables: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in UV_NAMES:
            variable, separator = UV_NAMES[name]
            values = str(ast.literal_eval(value)).split()
            variables[variable] = separator.join(
                filter(None, [variables.get(variable, ""), *values])
            )
    # Let uv take the best version from any index, as pip does. By default, uv takes the first index
    # that has the package.
    if "UV_INDEX" in variables:
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return variables


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
