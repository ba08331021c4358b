"""What more devices would bring: `python scripts/forecast.py <sweep folder>` from the counts that the sweep has measured.

Images per second and efficiency for 2 to 1,024 devices, strong and weak, with an interval and the error of counts left
out (docs/forecast.md). With --bandwidth-gbps, --latency-us and --devices-per-node it asks what another link would change.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file: Python adds scripts/, not the root

from src.engine.machine.secrets import mask


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a sweep over parallel.devices, with single or ddp")
    parser.add_argument("--devices", help="counts, e.g. 2,16,10000 (default: 2 to 1024)")
    parser.add_argument("--bandwidth-gbps", type=float, help="of the link between nodes, in 10^9 bits per second")
    parser.add_argument("--latency-us", type=float, help="of a message between nodes, in microseconds")
    parser.add_argument("--devices-per-node", type=int, help="devices joined as those measured are (default: 1)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse_args()
    try:
        from src.engine.report.forecast import COUNTS
        from src.engine.report.forecast_table import as_json, as_text, forecast_sweep

        answers = forecast_sweep(
            arguments.folder, counts=read_counts(arguments.devices) if arguments.devices else COUNTS, **link(arguments)
        )
    except ValueError as error:
        print(f"forecast.py: {' '.join(mask(str(error)).split())}", file=sys.stderr)
        return 2
    print(json.dumps(as_json(answers), indent=2) if arguments.json else "\n".join(as_text(answers)))
    return 0


def read_counts(text: str) -> list[int]:
    """Errors: ValueError for anything but whole numbers above 0."""
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--devices={text}: give whole numbers from 1, e.g. 2,16,10000")
    return [int(part) for part in parts]


def link(arguments: argparse.Namespace) -> dict[str, float | None]:
    """The link that is asked about, in bytes and seconds. Errors: ValueError for what no link has."""
    gbps, microseconds, per_node = arguments.bandwidth_gbps, arguments.latency_us, arguments.devices_per_node
    for name, value in (("--bandwidth-gbps", gbps), ("--devices-per-node", per_node)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value}: must be above 0")
    if microseconds is not None and not microseconds >= 0:
        raise ValueError(f"--latency-us={microseconds}: must be at least 0")
    if per_node is not None and gbps is None and microseconds is None:
        raise ValueError(f"--devices-per-node={per_node}: says where another link begins; give its --bandwidth-gbps")
    return {
        "bandwidth": None if gbps is None else gbps * 1e9 / 8,
        "latency": None if microseconds is None else microseconds / 1e6,
        "devices_per_node": per_node,
    }


if __name__ == "__main__":
    sys.exit(main())
