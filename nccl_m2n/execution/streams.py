# SPDX-License-Identifier: Apache-2.0
"""CUDA streams, whoever made them."""

from __future__ import annotations

from nccl_m2n.errors import TransportError
from nccl_m2n.transport.gpu import import_cupy
from nccl_m2n.typing import Stream


def stream_of(stream: Stream, device: int) -> Stream:
    """A CuPy stream for whatever names one.

    Args:
        stream: A CuPy or PyTorch stream, an object with ``__cuda_stream__``, an integer handle, or None
            for CuPy's current stream on the device. Never the legacy stream by omission.
        device: The GPU it belongs to.

    Raises:
        TransportError: If it names no stream.
    """
    cupy = import_cupy()
    if stream is None:
        with cupy.cuda.Device(device):
            return cupy.cuda.get_current_stream()
    if isinstance(stream, cupy.cuda.Stream | cupy.cuda.ExternalStream):
        return stream
    return cupy.cuda.ExternalStream(_handle(stream), device)


def _handle(stream: Stream) -> int:
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for attribute in ("cuda_stream", "ptr", "handle"):  # PyTorch; CuPy and its kin; cuda.core
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    raise TransportError(f"expected a CUDA stream or its integer handle, got {type(stream).__name__}")
