# SPDX-License-Identifier: Apache-2.0
"""What may stand on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

from nccl_m2n.cli.side import Side
from nccl_m2n.cli.updates import FLOATS, Update
from nccl_m2n.errors import CommandError
from nccl_m2n.measure import PEERS
from nccl_m2n.sharding import Parallelism
from nccl_m2n.transport import KINDS

PROGRAM = "python -m nccl_m2n"
SIDES = "sides"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

_MODEL = """a .safetensors file, an index, a directory or a config.json; the name of a shipped model, such as
Llama-3.1-8B; a model that an installed package carries (all-MiniLM-L6-v2), or package:DISTRIBUTION"""
_DOMAIN = """ranks that NVLink joins: N neighbours each, or 'sides' for one domain a side"""

_Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """Raises instead of ending the process: all ranks must hear of it first."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found.

        Raises:
            CommandError: Always.
        """
        raise CommandError(f"{message}; {self.prog} --help lists what there is")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line as a namespace, its `command` naming what to do.

    Raises:
        CommandError: For an unknown command or option, or a value that cannot be.
    """
    parser = Parser(prog=PROGRAM, description="Reshard, the M-to-N collective.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_refit(commands)
    _add_plan(commands)
    _add_simulate(commands)
    _add_bench(commands)
    _add_doctor(commands)
    return parser.parse_args(argv)


def _command(commands: _Commands, name: str, summary: str, text: str) -> Parser:
    made = commands.add_parser(name, help=summary, description=text, allow_abbrev=False)
    assert isinstance(made, Parser)
    made.add_argument(
        "--json", metavar="FILE", help="also write it as JSON; '-' writes JSON in place of the table"
    )
    return made


def _add_problem(parser: Parser) -> None:
    parser.add_argument("--model", required=True, metavar="MODEL", help=_MODEL)
    parser.add_argument(
        "--source", required=True, type=parallelism, metavar="SIZES", help="such as tp=4,pp=2"
    )
    parser.add_argument(
        "--destination", required=True, type=parallelism, metavar="SIZES", help="such as tp=8,dp=2"
    )
    _add_overlap(parser)
    parser.add_argument("--rules", metavar="FILE", help="JSON list of rules: which parameter is sharded how")
    parser.add_argument(
        "--replicate-unknown",
        action="store_true",
        help="leave parameters that no rule knows whole on every rank, and say how many they are",
    )
    parser.add_argument("--layers", type=count, metavar="N", help="only the first N layers of the model")
    parser.add_argument(
        "--staging-mib", type=count, default=256, metavar="N", help="staging that a rank may need (256)"
    )


def _add_overlap(parser: Parser) -> None:
    parser.add_argument(
        "--overlap", action="store_true", help="both sides start at rank 0, on the same ranks"
    )


def _add_carrier(parser: Parser) -> None:
    parser.add_argument(
        "--domain", type=domain, metavar="N", help=_DOMAIN + "; left out, what the transport finds"
    )
    parser.add_argument(
        "--transport",
        choices=("auto", *KINDS),
        default="auto",
        help="auto: nccl where every rank has a GPU, else mpi under mpiexec, socket under torchrun, local alone",
    )


def _add_refit(commands: _Commands) -> None:
    text = """Move a model's weights from one sharding to another with one collective, and verify every byte.
    Run it under mpiexec or torchrun, one rank a process; alone, all ranks are in this process. A model
    without data gets weights made up from names and positions, so that every byte can be verified as well."""
    parser = _command(commands, "refit", "move a model's real bytes and verify every one", text)
    _add_problem(parser)
    _add_carrier(parser)
    parser.add_argument("--steps", type=count, default=3, metavar="N", help="how often it is moved (3)")
    parser.add_argument("--ranks", type=count, metavar="N", help="how many ranks the local transport has")
    parser.add_argument(
        "--made-up", action="store_true", help="make the weights up even where the model has data"
    )
    parser.add_argument("--delta", action="store_true", help="send only what changed since the last step")
    parser.add_argument(
        "--update",
        type=update,
        metavar="KIND:X",
        help="what changes between steps: random:SHARE of the elements, or adam:RATE on masters in float32",
    )
    parser.add_argument(
        "--keep-as", choices=FLOATS, help="keep and move a checkpoint's floats as this element type"
    )
    parser.add_argument(
        "--timeout", type=positive, default=600.0, metavar="SECONDS", help="limit of one move (600)"
    )


def _add_plan(commands: _Commands) -> None:
    text = "Print what a refit would move, beside direct sends and gather and broadcast; needs no ranks."
    parser = _command(commands, "plan", "print what a refit would move", text)
    _add_problem(parser)
    parser.add_argument(
        "--domain", type=domain, metavar="N", help=_DOMAIN + "; left out, as refit on one machine"
    )


def _add_simulate(commands: _Commands) -> None:
    text = "Predict how long a refit would take on given links, beside direct sends and gather and broadcast."
    parser = _command(commands, "simulate", "predict how long a refit would take", text)
    _add_problem(parser)
    parser.add_argument(
        "--domain", type=domain, metavar="N", help=_DOMAIN + "; left out, as refit on one machine"
    )
    parser.add_argument(
        "--nic-gbytes",
        type=positive,
        default=50.0,
        metavar="X",
        help="GB/s of a rank's NIC, GB = 1e9 bytes (50)",
    )
    parser.add_argument(
        "--nvlink-gbytes", type=positive, default=450.0, metavar="X", help="GB/s of a rank's NVLink (450)"
    )
    parser.add_argument(
        "--changed",
        type=share,
        metavar="SHARE",
        help="send only what changed: this share of the elements, such as 0.02",
    )


def _add_bench(commands: _Commands) -> None:
    text = """Time a reshard of tensors of growing size beside its peers, in the same run, and check the results.
    Run it under mpiexec or torchrun, one rank a process; alone, all ranks are in this process."""
    parser = _command(commands, "bench", "time tensors of growing size beside peers", text)
    side = "mesh and placements, such as '4: S(0)' or '2x2: R S(1)'; without a mesh, half of the ranks"
    parser.add_argument("--source", type=side_of_bench, metavar="SIDE", help=side + " (S(0))")
    parser.add_argument("--destination", type=side_of_bench, metavar="SIDE", help="likewise (R)")
    _add_overlap(parser)
    parser.add_argument("-b", "--begin", type=size, default=1 << 20, metavar="BYTES", help="first size (1M)")
    parser.add_argument("-e", "--end", type=size, default=64 << 20, metavar="BYTES", help="last size (64M)")
    parser.add_argument("-f", "--factor", type=count, default=4, metavar="X", help="from size to size (4)")
    parser.add_argument("-n", "--iterations", type=count, default=20, metavar="N", help="timed runs (20)")
    parser.add_argument("-w", "--warmup", type=whole, default=5, metavar="N", help="runs before these (5)")
    parser.add_argument(
        "-c", "--check", type=int, choices=(0, 1), default=1, help="check the first and the last run (1)"
    )
    parser.add_argument(
        "--method", action="append", choices=tuple(PEERS), metavar="NAME",
        help=f"only this one; may be given again: {', '.join(map(repr, PEERS))}",
    )  # fmt: skip
    _add_carrier(parser)
    parser.add_argument(
        "--timeout", type=positive, default=60.0, metavar="SECONDS", help="limit of one run (60)"
    )


def _add_doctor(commands: _Commands) -> None:
    text = "Versions, GPUs, NVLink domains and NICs, and what works here and what does not."
    _command(commands, "doctor", "say what is here and what works", text)


def parallelism(text: str) -> Parallelism:
    """Parallel sizes; argparse would hide the reason behind a bare 'invalid value'."""
    try:
        return Parallelism.parse(text)
    except CommandError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def side_of_bench(text: str) -> Side:
    """Mesh and placements."""
    try:
        return Side.parse(text)
    except CommandError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size(text: str) -> int:
    """Bytes, with a binary unit where one is given: 1M are 1024 × 1024, as in nccl-tests."""
    digits, unit = text.rstrip("kKmMgG"), text.lstrip("0123456789").upper()
    if not digits.isdecimal() or unit not in UNITS or not int(digits):
        raise argparse.ArgumentTypeError(f"expected bytes such as 65536, 64K, 16M or 1G, got {text!r}")
    return int(digits) * UNITS[unit]


def whole(text: str) -> int:
    """A whole number of 0 or more."""
    return 0 if text == "0" else count(text)


def count(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return int(text)


def domain(text: str) -> int | str:
    """Ranks of a domain, or `SIDES`."""
    if text == SIDES:
        return text
    try:
        return count(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"expected the ranks of a domain, a whole number of 1 or more, or {SIDES!r}, got {text!r}"
        ) from None


def update(text: str) -> Update:
    """What changes between steps."""
    try:
        return Update.parse(text)
    except CommandError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, got {text!r}")
    return value


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value
