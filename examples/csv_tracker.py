"""A tracker that writes all numbers of a run to numbers.csv: step, name, value.

    cp examples/csv_tracker.py src/train/
    python train.py tracker=csv

The second line needs conf/tracker/csv.yaml, which has the key `use` with the dictionary
`{csv: src.train.csv_tracker.CsvTracker}`.
"""

import csv
from pathlib import Path

from src.schema import ResolvedConfig
from timm_parallel import Tracker


class CsvTracker(Tracker):
    def __init__(self, config: ResolvedConfig, folder: Path, resume_step: int) -> None:
        super().__init__(config, folder, resume_step)
        # A resumed run continues the file.
        self.file = open(folder / "numbers.csv", "a", newline="")
        self.writer = csv.writer(self.file)
        self.view = str(folder / "numbers.csv")

    def start(self) -> None:
        if not self.resume_step:
            self.writer.writerow(["step", "name", "value"])

    def numbers(self, step: int, epoch: float, time: float, values: dict[str, float]) -> None:
        self.writer.writerows([step, name, value] for name, value in values.items())

    def end(self, status: str, summary: dict[str, float]) -> None:
        self.file.close()
