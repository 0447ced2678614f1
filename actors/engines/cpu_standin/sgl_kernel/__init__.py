"""Stands in for SGLang's GPU kernels where there is no GPU: it can be imported, and none of it can be called.

SGLang imports ``sgl_kernel`` also on a CPU, where the real one fails for lack of libcuda.
"""

from typing import Any

__version__ = "999.0.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"sgl_kernel.{name} needs a GPU; this process serves on a CPU")

    return kernel
