"""Print the config on the console and, in a terminal, show a progress bar next to the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from timm_parallel.config.compose import plain_config
from timm_parallel.keys import Config, ResolvedConfig, leaves
from timm_parallel.machine.secrets import hide_in
from timm_parallel.machine.text import for_terminal

Item = TypeVar("Item")
# First line of a config of which only a part is printed.
DIFFERENCES = "config: differences from a plain `python train.py` (print_config=full shows all)"


class Console:
    """Progress bar of training steps on rank 0, shown only in a terminal.

    It is a context manager, so that the bar also disappears after an error.
    """

    def __init__(self, enabled: bool, total_steps: int, first_step: int) -> None:
        rich = RichConsole()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
        )
        shown = enabled and rich.is_terminal
        self._bar = Progress(*columns, console=rich, transient=True, disable=not shown)
        self._task = self._bar.add_task(
            "steps", total=total_steps, completed=first_step, numbers=""
        )

    def __enter__(self) -> Console:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, images_per_sec: float | None) -> None:
        speed = f"{images_per_sec:,.0f} images/s" if images_per_sec else ""
        self._bar.update(self._task, completed=step, numbers=f"loss {loss:.4f} {speed}")

    def counted(self, what: str, items: Iterable[Item], total: int) -> Iterator[Item]:
        """Yield items and count them in a second progress bar, which replaces the bar of training
        steps.

        `what`: the label of this bar.
        """
        self._bar.update(self._task, visible=False)
        task = self._bar.add_task(what, total=total, numbers="")
        try:
            for item in items:
                yield item
                self._bar.advance(task)
        finally:
            self._bar.remove_task(task)
            self._bar.update(self._task, visible=True)


def print_config(asked: Config, resolved: ResolvedConfig) -> None:
    """Print the resolved config with a line per key, with secrets masked.

    With print_config=true, there are only the strategy, the devices, and the keys that differ from
    those of a plain `python train.py`. `asked`: the config before `auto` was replaced, which shows
    what the user has set.
    """
    is_full, defaults = resolved.print_config == "full", {}
    lines = ["config" if is_full else DIFFERENCES]
    if not is_full:
        defaults = {key: value for key, value, _ in leaves(plain_config())}
    for key, value, _ in leaves(resolved if is_full else asked):
        if key in ("parallel.strategy", "parallel.devices") and value == "auto":
            value = f"{getattr(resolved.parallel, key.rpartition('.')[2])} (auto)"
        if key not in defaults or value != defaults[key]:
            shown = hide_in(value, key)
            lines.append(for_terminal(f"  {key}: {'null' if shown is None else shown}"))
    # The ranks write to the same stream.
    print("\n".join(lines), flush=True)
