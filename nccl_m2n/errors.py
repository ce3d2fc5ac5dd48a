# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, one class for each thing a caller may want to catch.

Every class is also the built-in error that a user would think of, so ``except ValueError`` works.
"""

from __future__ import annotations


class M2nError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        raised_by: How many ranks raised it, all of them and with the same text; 0 where that is not known.
    """

    raised_by: int = 0


class LayoutError(M2nError, ValueError):
    """A mesh, a placement or a layout that cannot be, or an array that does not fit one."""


class PlanError(M2nError, ValueError):
    """A transfer that cannot be planned, or a plan that breaks an invariant."""


class DisagreementError(M2nError, ValueError):
    """The ranks described different problems, or one of them described a wrong one."""


class TransportError(M2nError, RuntimeError):
    """The transport cannot be formed or has failed; nothing more can be sent over it."""


class TransferTimeout(TransportError, TimeoutError):
    """A wait ran past its time limit, most often because a peer is gone."""


class VerificationError(M2nError, ValueError):
    """Bytes arrived that differ from the ones that were sent."""


class CommandError(M2nError, ValueError):
    """A command-line argument that cannot be understood or met."""
