"""Print the headline result of a sweep's report in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from timm_parallel.machine.files import read_json

MOST_ROWS = 20


def show_headline(folder: Path) -> None:
    """Print the table and the headline result of report.json in `folder`, and the command that the
    report recommends.
    """
    # Import this module only at the end of a sweep, because the import is slow.
    from timm_parallel.lab.report.records import FORMAT

    report = read_json(folder / "report.json", FORMAT, "was a report written here?")
    console = show_table(report["table"])
    # A report without a finished job has no headline result. An inconclusive one has no command.
    lead = report["lead"] or {"sentence": "", "command": ""}
    for line in filter(None, (lead["sentence"], lead["command"])):
        console.print(line, soft_wrap=True)


def show_table(rows: Sequence[Mapping[str, str]]) -> Console:
    """Print the first rows of a table, and how many rows are left out. Return the console, for
    further output.
    """
    console = Console(
        width=None if Console().is_terminal else 200, markup=False, emoji=False, highlight=False
    )
    if rows:
        table = Table(*rows[0])
        for row in rows[:MOST_ROWS]:
            table.add_row(*row.values())
        console.print(table)
    if len(rows) > MOST_ROWS:
        console.print(f"… {len(rows) - MOST_ROWS} more rows in the report")
    return console
