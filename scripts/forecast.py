"""Forecast the speed of training on more devices from a sweep over parallel.devices: `python
scripts/forecast.py <sweep folder>`.

The script prints images per second and efficiency for 2 to 1,024 devices, for strong and weak
scaling, each with an interval. It also prints the error of the forecast for device counts that it
leaves out of the fit (docs/dev/forecast.md). The options --bandwidth-gbps, --latency-us and
--devices-per-node describe another link between devices.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timm_parallel import CommandLine


@CommandLine.errors_in_one_line
def main(argv: list[str]) -> int:
    parser = CommandLine(__doc__)
    parser.add_argument(
        "folder", type=Path, help="a sweep over parallel.devices, with single or ddp"
    )
    parser.add_argument(
        "--devices", type=CommandLine.counts, help="e.g. 2,16,10000; default: 2 to 1024"
    )
    parser.add_argument(
        "--bandwidth-gbps",
        type=CommandLine.number(above=0),
        help="of a link between nodes, in 10^9 bits per second",
    )
    parser.add_argument(
        "--latency-us",
        type=CommandLine.number(),
        help="microseconds of a message between nodes",
    )
    parser.add_argument(
        "--devices-per-node",
        type=CommandLine.number(int, least=1),
        help="devices joined by the measured link (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse_intermixed_args(argv)
    from timm_parallel.lab import as_text, forecast_sweep

    given = {"counts": arguments.devices} if arguments.devices else {}
    answers = forecast_sweep(arguments.folder, **given, **link(arguments))
    print(
        json.dumps(answers, indent=2, default=asdict)
        if arguments.json
        else "\n".join(as_text(answers))
    )
    return 0


def link(arguments: Any) -> dict[str, float | None]:
    """Convert the options that describe the link between nodes to bytes per second and seconds."""
    gbps, microseconds, per_node = (
        arguments.bandwidth_gbps,
        arguments.latency_us,
        arguments.devices_per_node,
    )
    if per_node is not None and gbps is None and microseconds is None:
        raise ValueError(
            f"devices-per-node={per_node}: has no effect without the bandwidth between nodes; give "
            "bandwidth-gbps too"
        )
    return {
        "bandwidth": None if gbps is None else gbps * 1e9 / 8,
        "latency": None if microseconds is None else microseconds / 1e6,
        "devices_per_node": per_node,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
