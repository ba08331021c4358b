"""Print the versions of torch and timm and the devices that torch sees, as one line of JSON. A
separate process runs this module, because a broken torch may crash.
"""

from __future__ import annotations

import json


def main() -> None:
    # Import timm too, because it loads torchvision, which may not match this version of torch.
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
