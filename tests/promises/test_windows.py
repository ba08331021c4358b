"""Where the names are missing that only Unix has, training starts; what torch cannot do there is refused in a line."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Train, resolved

from src.engine.machine import hardware, platform

ROOT = Path(__file__).resolve().parents[2]
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


def names_of_unix(source: str) -> list[str]:
    """Modules and attributes of signal and os that a file names and Windows lacks."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in UNIX]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("os", "signal"):
            found += [node.attr] if node.attr in UNIX_NAMES else []
    return found


def test_one_module_knows_what_a_platform_lacks() -> None:
    allowed = {"src/engine/machine/platform.py"}
    linux_only = {"src/engine/machine/process.py": ["SIGKILL", "SIGKILL"]}  # below `if sys.platform != "linux": return`
    for path in [*ROOT.glob("*.py"), *(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        name = path.relative_to(ROOT).as_posix()
        if name not in allowed:
            assert names_of_unix(path.read_text(encoding="utf-8")) == linux_only.get(name, []), name
    assert set(names_of_unix("import fcntl, os\nos.uname()\nsignal.SIGHUP")) == {"fcntl", "uname", "SIGHUP"}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["dp", "ddp"])  # single is started as dp is
def test_training_starts_without_what_windows_lacks(train: Train, parallel: str) -> None:
    done = train(f"parallel={parallel}", "train.max_steps=2", environment={"PYTHONPATH": str(HERE)})
    assert done.returncode == 0, done.output
    assert done.result["status"] == "done"
    assert all(entry["peak_bytes"] > 2**20 for entry in done.result["memory"])
    assert done.result["world_size"] == 2


@pytest.mark.processes
def test_the_hidden_names_are_hidden() -> None:
    """Else the test above would prove nothing; and of the stop signals those are left that Windows knows."""
    code = (
        "import signal; from src.engine.machine import platform as p; print(hasattr(signal, 'SIGHUP'), p.STOP_SIGNALS);"
        "exec(compile('import fcntl', 'x', 'exec'), {'__name__': 'src.x'})"
    )
    environment = {"PYTHONPATH": f"{HERE}:{ROOT}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert "False" in done.stdout
    assert "SIGTERM" in done.stdout
    assert "USR" not in done.stdout
    assert "fcntl: hidden" in done.stderr


def test_nccl_is_refused_on_windows_by_naming_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    from src.engine.config import resolve

    device = hardware.CudaDevice(0, "a GPU", 2**34, "GPU-0")
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: (device, device))
    monkeypatch.setattr(platform, "WINDOWS", True)
    monkeypatch.setattr(resolve, "WINDOWS", True)
    assert resolved("parallel=ddp", "parallel.accelerator=cuda").parallel.backend == "gloo"
    with pytest.raises(ValueError, match=r"parallel\.backend=nccl: .*WSL 2"):
        resolved("parallel=ddp", "parallel.accelerator=cuda", "parallel.backend=nccl")


def test_a_ctrl_c_reaches_a_child_once_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Child:
        def __init__(self) -> None:
            self.heard: list[int] = []

        def poll(self) -> None:
            return None

        def send_signal(self, number: int) -> None:
            self.heard.append(number)

    child = Child()
    platform.pass_on(2, child)  # type: ignore[arg-type]
    monkeypatch.setattr(platform, "WINDOWS", True)
    platform.pass_on(2, child)  # type: ignore[arg-type]
    platform.pass_on(15, child)  # type: ignore[arg-type]
    assert child.heard == [2, 15]
