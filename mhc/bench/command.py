"""On this GPU: `latency` and `serving` time, `sanitize` looks for memory errors and races.

`wheels` packs for offline hosts, `show` prints a record.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mhc.bench import latency, sanitize, serving, wheels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m mhc bench`."""
    commands = parser.add_subparsers(dest="bench", required=True, metavar="COMMAND")
    for module in (latency, serving, sanitize, wheels):
        name = module.__name__.rpartition(".")[2]
        sub = commands.add_parser(
            name, help=(module.__doc__ or "").splitlines()[0], description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.add_arguments(sub)
        sub.set_defaults(action=module.run)
    show = commands.add_parser("show", help="Print a record's tables and targets.")
    show.add_argument("record", type=Path)
    show.set_defaults(action=_show)


def run(args: argparse.Namespace) -> int:
    """Run one; bad input and missing things are one sentence."""
    try:
        return int(args.action(args))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"mhc bench {args.bench}: {error}", file=sys.stderr)
        return 1


def _show(args: argparse.Namespace) -> int:
    from mhc.bench import records, serving_stats, summary

    record = records.load(args.record)
    print({"serving": serving_stats.text}.get(record.run["what"], summary.text)(record))
    return 0
