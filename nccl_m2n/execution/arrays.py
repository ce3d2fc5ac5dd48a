# SPDX-License-Identifier: Apache-2.0
"""Views as arrays again: NumPy's for host memory, CuPy's for a device."""

from __future__ import annotations

from typing import Any

import numpy as np

from nccl_m2n.execution.host import memory, numpy_type
from nccl_m2n.execution.views import ArrayView


def as_array(view: ArrayView) -> Any:
    """What a view sees, as an array with its element type, without copying it.

    On a device a type that CuPy lacks (bfloat16, fp8) is seen as unsigned integers of its size.

    Raises:
        TransportError: If ml_dtypes, which has NumPy's bfloat16 and fp8, is needed and missing.
    """
    if view.device:
        from nccl_m2n.execution.device_arrays import as_typed_cupy

        return as_typed_cupy(view)
    kind = numpy_type(view.dtype)
    if not view.size:
        return np.empty(view.shape, kind)
    low, high = view.span
    array = np.ndarray(view.shape, kind, memory(low, high - low), view.pointer - low, view.strides)
    array.flags.writeable = view.writable
    return array
