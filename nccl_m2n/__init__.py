# SPDX-License-Identifier: Apache-2.0
"""Reshard: move a tensor, or a whole model, from one sharding to another in one collective call."""

__version__ = "0.1.0.dev0"
