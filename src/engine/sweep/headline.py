"""The headline result of a sweep's report, in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

MOST_ROWS = 20


def show_headline(folder: Path) -> None:
    """Print the table and the first sentence of the report in `folder`, and the command that it recommends."""
    from src.engine.report.report import read_headline  # slow to import

    headline = read_headline(folder)
    console = Console(width=None if Console().is_terminal else 200, markup=False, emoji=False, highlight=False)
    if headline.rows:
        table = Table(*headline.rows[0])
        for row in headline.rows[:MOST_ROWS]:
            table.add_row(*row.values())
        console.print(table)
    if len(headline.rows) > MOST_ROWS:
        console.print(f"… {len(headline.rows) - MOST_ROWS} more rows in the report")
    for line in filter(None, (headline.sentence, headline.command)):
        console.print(line, soft_wrap=True)
