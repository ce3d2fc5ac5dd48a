# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault(
    "JAX_PLATFORMS", "cpu"
)  # its arrays play arrays of the host, on a machine with a GPU too

# Two shared cores make single examples slow now and then; the time limit of a test is pytest-timeout's.
settings.register_profile(
    "nccl_m2n", deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("nccl_m2n")
