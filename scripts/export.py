"""Export a trained model for other programs.

    python scripts/export.py run=<run folder>
    python scripts/export.py run=<run folder> format=onnx
    python scripts/export.py run=<run folder> format=hub

The format safetensors writes model.safetensors and config.json (class names, preprocessing), which
timm loads. hub also writes a model card, and transformers loads the folder too. onnx writes one
file. The script prints the Python code that loads the export. The exported
model returns scores. Probabilities are the softmax of the scores, or with train.loss=bce the
sigmoid of each score.
"""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timm_parallel import command_line, errors_in_one_line

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


@errors_in_one_line
def main(argv: list[str]) -> int:
    """Export the model of a run. Return the exit code: 0 if done, 1 if the exported model has other
    outputs than the checkpoint, 2 if an argument is wrong.
    """
    parser = command_line(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--format", choices=["safetensors", "onnx", "hub"], default="safetensors")
    parser.add_argument(
        "--output", type=Path, help="folder (default: <run folder>/export, of hub <run folder>/hub)"
    )
    parser.add_argument("--checkpoint", help="best, last or a file")
    parser.add_argument(
        "--weights",
        choices=["model", "ema"],
        help="default: those that checkpoint.metric evaluates",
    )
    given = parser.parse_intermixed_args(argv)
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    if given.format == "onnx" and missing:
        raise ValueError(
            f"format=onnx: {', '.join(missing)}: not installed; pip install -r "
            "requirements-export.txt"
        )

    import torch

    from src.commands.export import export_hub, export_onnx, export_safetensors
    from src.commands.load import load_trained

    folder = given.output or given.run / ("hub" if given.format == "hub" else "export")
    trained = load_trained(given.run, given.checkpoint, given.weights, torch.device("cpu"))
    exports = {"onnx": export_onnx, "hub": export_hub}
    try:
        loaded_by = exports.get(given.format, export_safetensors)(trained, folder)
    except RuntimeError as error:
        print(f"export.py: {error}", file=sys.stderr)
        return 1
    print(
        f"wrote {folder} from {trained.checkpoint} ({trained.weights} weights; outputs verified "
        "equal). Load with:"
    )
    for line in loaded_by:
        print(f"  {line}")
    if loaded_by[0].startswith("timm."):
        print(
            "note: apply the EXIF rotation and convert 16-bit images to 8 bits first; timm's "
            "transform does neither"
        )
    if given.format == "hub":
        print(
            f"choose a license in {folder / 'README.md'} and read it, because it has your "
            "command; then upload with"
        )
        print(f"  hf upload '<user>/<name>' {shlex.quote(str(folder))} .")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
