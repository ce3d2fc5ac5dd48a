# SPDX-License-Identifier: Apache-2.0
"""Measuring reshards on GPUs beside what they are compared with, every byte verified."""

from nccl_m2n.measure.cases import CASES, Case
from nccl_m2n.measure.peers import PEERS
from nccl_m2n.measure.run import measure_case

__all__ = ["CASES", "PEERS", "Case", "measure_case"]
