# SPDX-License-Identifier: Apache-2.0
"""Runs that send only what changed since the last one, on the routes of the plan."""
