# SPDX-License-Identifier: Apache-2.0
"""CuPy, imported only where a GPU is really used, and errors that say what to install where it is not."""

from __future__ import annotations

from nccl_m2n.errors import TransportError
from nccl_m2n.text import pip_install
from nccl_m2n.typing import Library


def import_cupy() -> Library:
    """CuPy.

    Raises:
        TransportError: If it is not installed or does not find CUDA.
    """
    try:
        import cupy
    except ImportError as error:
        raise TransportError(
            f"CuPy is not available ({error}): {pip_install('cuda12')}, or cuda13 for CUDA 13"
        ) from None
    return cupy


def device_count() -> int:
    """GPUs that this process sees, at least one.

    Raises:
        TransportError: If there are none.
    """
    cupy = import_cupy()
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise TransportError(f"no GPU can be used: {error}") from None
    if count == 0:
        raise TransportError("no GPU is visible to this process: check CUDA_VISIBLE_DEVICES")
    return count
