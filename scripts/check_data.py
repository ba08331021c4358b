"""Check a dataset before training on it.

    python scripts/check_data.py data=folder data.root=/data/flowers
    python scripts/check_data.py data=csv data.root=/data/flowers/labels.csv page=flowers.html

The script finds unreadable images, exact duplicates within a split and across splits, groups in two
splits, equal images with different labels, and classes without an image in a split. It shows class
counts, sizes and modes of the images. It takes the keys of train.py. Exit code: 0 no problem, 1
problems in the data, 2 a wrong argument.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timm_parallel import command_line, errors_in_one_line, file_argument


@errors_in_one_line
def main(argv: list[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    parser.add_argument("--output", type=file_argument, help="JSON file with everything")
    parser.add_argument(
        "--page", type=file_argument, help="HTML file with thumbnails of problems and of each class"
    )
    arguments = parser.parse_intermixed_args(argv)

    from timm_parallel import (
        Task,
        check_data,
        compose,
        csv_groups,
        find_task,
        load_dataset,
        write_json,
    )
    from timm_parallel.lab import check_images, show_check, write_page

    config = compose(*arguments.overrides)
    is_csv, target = config.data.name == "csv", find_task(config.train.task, Task).target
    # For a CSV file, skip check_data, which raises an error for a missing file or a group in
    # two splits. check_images reports these problems together with all others.
    if not is_csv:
        check_data(config)
    dataset = load_dataset(config)
    report = check_images(dataset, target, csv_groups(config.data, target) if is_csv else None)
    show_check(report)
    if arguments.output is not None:
        write_json(arguments.output, {"format": 1, **asdict(report)})
    if arguments.page is not None:
        write_page(report, dataset, arguments.page)
    return 1 if report.has_problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
