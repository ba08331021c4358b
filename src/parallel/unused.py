"""DistributedDataParallel that names the parameters which got no gradient; torch's own gives their numbers."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class NamingParallel(DistributedDataParallel):
    """Its reducer waits for a gradient of every parameter, and finds out in the next step's forward pass that none came."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            names = unused_parameters(str(error), self.module)
            if not names:
                raise
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise RuntimeError(
                f"no gradient reached {shown}: the loss does not depend on them. Set parallel.find_unused_parameters=true, "
                "or freeze or remove them"
            ) from error


def unused_parameters(message: str, module: nn.Module) -> list[str]:
    """Names of the parameters whose numbers stand in torch's message; empty for any other message."""
    found = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", message)
    if found is None:
        return []
    learned = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return [learned[int(number)].removeprefix("model.model.") for number in found.group(1).split()]
