"""Public functions that read or start many runs: reports, verdicts and checks of data and
machine. `__init__.pyi` lists their names.
"""

from timm_parallel.public_names import attach

__getattr__, __dir__, __all__ = attach(__name__)
