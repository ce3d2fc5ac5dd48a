# SPDX-License-Identifier: Apache-2.0
"""Names for what has no one type: things of other packages, told by what they can do, and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = Any  # an array of NumPy, CuPy, PyTorch, JAX, …; see `nccl_m2n.execution.views`
Stream: TypeAlias = Any  # a CUDA stream of CuPy's, PyTorch's or cuda.core's; None stands for the current one
Communicator: TypeAlias = Any  # of mpi4py's or nccl4py's
Library: TypeAlias = Any  # NumPy, or CuPy, which has the same functions
DType: TypeAlias = Any  # whatever `nccl_m2n.dtypes.dtype_name` understands

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]
Table: TypeAlias = np.ndarray[Any, np.dtype[np.void]]  # a structured array; its dtype stands beside its maker

Json: TypeAlias = Any  # what json.loads returns
JsonObject: TypeAlias = dict[str, Any]
ReadJson: TypeAlias = Mapping[str, Any]
