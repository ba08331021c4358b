"""Print versions and devices of torch as one line of JSON. Run in its own process, because a broken
torch may crash.
"""

from __future__ import annotations

import json


def main() -> None:
    # Importing timm loads torchvision, which may not fit this torch.
    import timm
    import torch

    report = {
        "version": torch.__version__,
        "timm": timm.__version__,
        "cuda": torch.version.cuda,
        "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": torch.backends.mps.is_available(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
