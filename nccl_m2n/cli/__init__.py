# SPDX-License-Identifier: Apache-2.0
"""The command line: plans, refits and diagnoses without a line of Python."""

from nccl_m2n.cli.command import main

__all__ = ["main"]
