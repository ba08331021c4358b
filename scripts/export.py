"""A trained model for other programs.

    python scripts/export.py run=<run folder>

Writes model.safetensors and config.json (class names, data config), which timm loads; what loads them is printed.
Also: format=safetensors|torch_export  output=<folder> (default: <run folder>/export)
      checkpoint=best|last|<file>  weights=model|ema (default: those that checkpoint.metric judged)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file: Python adds scripts/, not the root

from src.engine.config.arguments import one_of, parse_arguments
from src.engine.machine.secrets import mask

OPTIONS = {**dict.fromkeys(("run", "output", "checkpoint", "weights")), "format": "safetensors"}


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 1 the export is not the model, 2 refused."""
    try:
        options = parse_arguments(arguments, OPTIONS, ("run",), str(__doc__))
        form = one_of(options, "format", "safetensors", "torch_export")
        weights = one_of(options, "weights", "model", "ema")

        import torch

        from src.trained.export import export_program, export_safetensors
        from src.trained.load import load_trained

        run = Path(options["run"])
        folder = Path(options.get("output", run / "export"))
        trained = load_trained(run, options.get("checkpoint"), weights, torch.device("cpu"))
        loaded_by = (export_program if form == "torch_export" else export_safetensors)(trained, folder)
    except ValueError as error:
        print(f"export.py: {' '.join(mask(str(error)).split())}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"export.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(f"{folder}: the {trained.weights} weights of {trained.checkpoint}, and they give its outputs; loaded by")
    for line in loaded_by:
        print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
