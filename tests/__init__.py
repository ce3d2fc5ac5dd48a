# SPDX-License-Identifier: Apache-2.0
"""The tests. Expected values come from slicing the global array, or from `tests.naive`."""
