"""What torch says of itself, asked in a process of its own, because a broken torch may take its process along.

python -m src.engine.doctor.probe torch|rendezvous      prints one line of JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any


def torch_says() -> dict[str, Any]:
    """Versions, devices, backends, and which devices reach each other's memory."""
    import torch
    from torch import distributed

    with_backends = distributed.is_available()
    backends = {"gloo": distributed.is_gloo_available, "nccl": distributed.is_nccl_available} if with_backends else {}
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(index) for index in range(count)],
        "backends": [name for name, is_there in backends.items() if is_there()],
        "peers": sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs),
        "pairs": len(pairs),
        "mps": torch.backends.mps.is_available(),
    }


def timm_says() -> dict[str, Any]:
    """Importing timm loads torchvision's operators, which a torchvision of another build does not have."""
    import timm

    return {"version": timm.__version__}


def rendezvous() -> dict[str, Any]:
    """A store on loopback, as ranks meet at one, and a word through it."""
    from src.engine.launch.rendezvous import Rendezvous
    from src.engine.machine.ranks import Place

    store = Rendezvous(Place(), timeout=10).store
    store.clone().set("doctor", "here")
    return {"said": store.get("doctor").decode()}


if __name__ == "__main__":
    asked = {"torch": torch_says, "timm": timm_says, "rendezvous": rendezvous}
    print(json.dumps(asked[sys.argv[1]]()))
