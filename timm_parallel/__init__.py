"""Library that trains image models on one device, or on several with DataParallel,
DistributedDataParallel or FSDP2.

The names in `__init__.pyi` are public, and docs/api.md lists them under its comments. All other
names of the library may change in any version.
"""

from timm_parallel.public_names import attach

__getattr__, __dir__, __all__ = attach(__name__)
