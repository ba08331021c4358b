"""Windows: the project can be imported, one module contains all names that exist only on Unix, a run is refused."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from configs import resolved
from src.engine.config import resolve

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent / "without_unix"
UNIX = {"fcntl", "resource", "pwd", "grp", "termios"}
UNIX_NAMES = {
    "SIGHUP",
    "SIGUSR1",
    "SIGUSR2",
    "SIGKILL",
    "SIGQUIT",
    "uname",
    "killpg",
    "getpgid",
    "pread",
    "geteuid",
    "fork",
}


def unix_names(source: str) -> list[str]:
    """Return the modules, and the attributes of signal and os, that a file uses and that Windows lacks."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if alias.name in UNIX]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("os", "signal"):
            names += [node.attr] if node.attr in UNIX_NAMES else []
    return names


def test_only_one_module_uses_names_that_windows_lacks() -> None:
    allowed = {"src/engine/machine/platform.py"}
    linux_only = {
        "src/engine/machine/process.py": ["SIGKILL", "SIGKILL"],  # below `if sys.platform != "linux": return`
        "src/engine/launch/fork_server.py": ["fork", "fork"],  # runs on Linux only
    }
    for path in [*ROOT.glob("*.py"), *(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        name = path.relative_to(ROOT).as_posix()
        if name not in allowed:
            assert unix_names(path.read_text(encoding="utf-8")) == linux_only.get(name, []), name
    assert set(unix_names("import fcntl, os\nos.uname()\nsignal.SIGHUP")) == {"fcntl", "uname", "SIGHUP"}


@pytest.mark.processes
def test_train_and_evaluate_can_be_imported_when_unix_modules_are_missing() -> None:
    code = (
        "import signal, train, evaluate; from src.engine.machine import platform, lock, process, signals, usage;"
        "from src.engine import multirun; from src.engine.launch import job, rank;"
        "print(hasattr(signal, 'SIGHUP'), platform.STOP_SIGNALS);"
        "exec(compile('import fcntl', 'x', 'exec'), {'__name__': 'src.x'})"
    )
    environment = {"PYTHONPATH": f"{HERE}:{ROOT}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert "False" in done.stdout, done.stderr
    assert "SIGTERM" in done.stdout
    assert "USR" not in done.stdout
    assert "fcntl: hidden" in done.stderr


def test_run_is_refused_on_windows_and_error_recommends_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "WINDOWS", True)
    with pytest.raises(ValueError, match=r"^Windows: .*WSL 2"):
        resolved("parallel=single")
