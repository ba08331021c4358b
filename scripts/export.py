"""A trained model for other programs.

    python scripts/export.py run=<run folder>

Writes model.safetensors and config.json (class names, data config), which timm loads; what loads them is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file: Python adds scripts/, not the root

from src.engine.config.arguments import CommandLine, refused_in_a_line
from src.engine.machine.secrets import mask


@refused_in_a_line
def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 the export is not the model, 2 refused."""
    parser = CommandLine(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--format", choices=["safetensors", "torch_export"], default="safetensors")
    parser.add_argument("--output", type=Path, help="folder (default: <run folder>/export)")
    parser.add_argument("--checkpoint", help="best, last or a file")
    parser.add_argument("--weights", choices=["model", "ema"], help="default: those that checkpoint.metric judged")
    given = parser.read(argv)

    import torch

    from src.trained.export import export_program, export_safetensors
    from src.trained.load import load_trained

    folder = given.output or given.run / "export"
    trained = load_trained(given.run, given.checkpoint, given.weights, torch.device("cpu"))
    try:
        loaded_by = (export_program if given.format == "torch_export" else export_safetensors)(trained, folder)
    except RuntimeError as error:
        print(f"export.py: {' '.join(mask(str(error)).split())}", file=sys.stderr)
        return 1
    print(f"{folder}: the {trained.weights} weights of {trained.checkpoint}, and they give its outputs; loaded by")
    for line in loaded_by:
        print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
