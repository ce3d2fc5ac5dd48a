# SPDX-License-Identifier: Apache-2.0
"""Measuring reshards beside what they are compared with, in GPU or host memory, results verified."""

from nccl_m2n.measure.cases import CASES, Case
from nccl_m2n.measure.peers import PEERS, available
from nccl_m2n.measure.report import Volume, results_table, write_results
from nccl_m2n.measure.run import measure_case

__all__ = ["CASES", "PEERS", "Case", "Volume", "available", "measure_case", "results_table", "write_results"]
