# SPDX-License-Identifier: Apache-2.0
"""Binding plans to arrays, and running them."""
