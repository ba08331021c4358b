"""Class `App`: the names, classes and functions that a project gives to the library. All of the
library may import this file.

The library contains no import of the project. It imports the project's functions by their dotted
names when it calls them. So --help and the check of a config need neither torch nor timm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from timm_parallel.keys import Config, ResolvedConfig
from timm_parallel.machine.imports import import_name, slow_imports

# Name of an app by convention, for scripts and notebooks that do not import theirs.
DEFAULT = "src.app:app"
# Modules that runs import besides those of the functions of the project.
IMPORTED_BY_RUNS = ("timm_parallel.parallel.data_parallel", "torch.utils.tensorboard")


@dataclass(frozen=True)
class App:
    """A project that the library trains. Building an App makes that project the current one of this
    process.
    """

    # Import path of the app, `src.app:app`, by which a rank imports it.
    name: str
    # Folder that contains train.py, conf/ and the project's package.
    root: Path
    # Its config class, and that of configs in which each `auto` is replaced.
    config: type[Config]
    resolved: type[ResolvedConfig]
    # Dotted name of the function that builds the parts of a run on one rank with `build_parts`.
    # Arguments: config, strategy.
    build: str
    # Dotted name of the function that takes the steps of a run. Argument: a Training.
    loop: str
    # Dotted name of the function that yields an error message for each config key that does not fit
    # the other keys. Argument: config.
    rules: str
    # Overrides for a run of a few seconds, with which `make doctor` tests each strategy.
    trial: tuple[str, ...]
    # Names in a config -> dotted names of classes. If the dictionary is empty, the check of a
    # config accepts any name.
    tasks: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        global _current
        _current = self


_current: App | None = None


def current() -> App:
    """Return the app of this process: the last one that was built. If there is none, import
    src.app:app.
    """
    return _current or find_app(DEFAULT)


def import_all() -> None:
    """Import the modules that a run needs. Called in the server process that forks the jobs of a
    sweep.
    """
    with slow_imports():
        for name in (current().build, current().loop):
            import_name(name)
        for module in IMPORTED_BY_RUNS:
            import_module(module)


def package() -> str:
    """Return the name of the project's package, e.g. `src`."""
    return current().name.partition(".")[0]


def root() -> Path:
    """Return the folder of the project, which contains train.py."""
    return current().root


def as_resolved(config: Config) -> ResolvedConfig:
    """Convert a config to the project's class of resolved configs. Raises ValueError if a value is
    still `auto`.
    """
    default = current().resolved()
    parallel = type(default.parallel)(**vars(config.parallel))
    train = type(default.train)(**vars(config.train))
    for key, value in (
        ("parallel.devices", parallel.devices),
        ("parallel.threads_per_device", parallel.threads_per_device),
        ("train.accumulate", train.accumulate),
    ):
        if not isinstance(value, int):
            raise ValueError(
                f"{key}=auto: config.yaml of a run must have an integer; replace auto by a number"
            )
    return current().resolved(**{**vars(config), "parallel": parallel, "train": train})


def code_files() -> dict[str, Path]:
    """Find the Python files that a run may use, tests excluded. Return a dictionary from relative
    path to full path. A relative path starts at the project folder, or at the folder that contains
    the library.
    """
    project, library = root(), Path(__file__).parent
    own = [project / "train.py", *sorted((project / package()).rglob("*.py"))]
    files = {path.relative_to(project).as_posix(): path for path in own}
    for path in sorted(library.rglob("*.py")):
        if path.relative_to(library).parts[0] not in ("tests", "testing"):
            files[path.relative_to(library.parent).as_posix()] = path
    return files


def code_hashes() -> dict[str, str]:
    """Compute a hash of each Python file that a run may use. Return a dictionary from relative path
    to hash.
    """
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        for name, path in code_files().items()
    }


def find_app(name: str) -> App:
    """Import an app by a name such as `src.app:app` (`<module>:<attribute>`). Raises ValueError if
    the attribute is no App.
    """
    module, _, attribute = name.partition(":")
    app = getattr(import_module(module), attribute, None)
    if not isinstance(app, App):
        raise ValueError(
            f"{name}: this is not an App; expected <module>:<attribute>, e.g. src.app:app"
        )
    return app
