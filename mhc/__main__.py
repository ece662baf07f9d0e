"""`python -m mhc COMMAND`: one module a command, imported only when it is asked for.

A command module has a docstring (its first line is the help), `add_arguments(parser)` and `run(args) -> int`,
the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# command: (module, one line of help); the line stands here so that the list needs no import
COMMANDS = {
    "gsm8k": ("mhc.gsm8k.command", "ask GSM8K of the miniature pair or of any OpenAI-compatible server"),
    "train": ("mhc.dspark.train_command", "train the miniature target and its DSpark draft"),
    "draft-split": ("mhc.dspark.split_command", "time one draft round on this GPU, part by part"),
    "bench": ("mhc.bench.command", "time and check kernels on this GPU, beside peers; pack wheels for offline hosts"),
    "export-kernels": ("mhc.export", "compile the kernels into a folder, for servers that must not compile"),
    "report": ("mhc.report", "execute the notebooks and render build/report.html"),
    "vllm-status": ("mhc.vllm_plugin.status", "what the vLLM plugin would change in the installed vLLM, and why"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 wrong usage."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: python -m mhc COMMAND [options]\n")
        print("\n".join(f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()))
        print("\n`python -m mhc COMMAND --help` lists a command's options.")
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"mhc: no command {argv[0]!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(COMMANDS[argv[0]][0])
        parser = argparse.ArgumentParser(
            prog=f"python -m mhc {argv[0]}",
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(parser)
        return int(module.run(parser.parse_args(argv[1:])) or 0)
    except ModuleNotFoundError as error:
        if (error.name or "mhc").partition(".")[0] == "mhc":
            raise
        print(f"mhc {argv[0]}: needs {error.name}, which is not installed; the extras of pyproject.toml list it, "
              "e.g. pip install -e '.[gsm8k,report]'", file=sys.stderr)  # fmt: skip
        return 1


if __name__ == "__main__":
    sys.exit(main())
