# SPDX-License-Identifier: Apache-2.0
"""A transport over NCCL that drives all ranks from this process, on as many GPUs as there are."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nccl_m2n.errors import TransportError
from nccl_m2n.transport.gpu import device_count
from nccl_m2n.transport.nccl import NcclTransport, nccl_bindings
from tests.scenarios import RANKS

SEVERAL_RANKS_A_GPU = 23000  # the NCCL that can put several ranks on one GPU, if told so


@pytest.fixture(scope="session")
def transport() -> Iterator[NcclTransport]:
    """Eight ranks: one a GPU, or all on the first."""
    try:
        version, gpus = nccl_bindings().get_version(), device_count()
    except TransportError as error:
        pytest.skip(f"no GPU tests: {error}")
    if gpus < RANKS:
        if version < SEVERAL_RANKS_A_GPU:
            pytest.skip(f"no GPU tests: {RANKS} GPUs or NCCL 2.30 are needed, here are {gpus} and {version}")
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        os.environ.setdefault("NCCL_MAX_CTAS", "4")  # the ranks' kernels must all find room at once
    with NcclTransport.init_all([rank if gpus >= RANKS else 0 for rank in range(RANKS)]) as made:
        yield made
