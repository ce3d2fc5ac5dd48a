# SPDX-License-Identifier: Apache-2.0
"""Random problems of every kind, checked by slicing the whole tensor; ``python -m tests.fuzz --help``."""
