# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tests.cli.runs import checkpoint

__all__ = ["checkpoint"]
