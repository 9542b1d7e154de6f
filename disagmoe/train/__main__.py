"""`python -m disagmoe.train`: one line per mistake, exit status 2 for the user's, 1 for a failed rank."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from disagmoe.train.config import describe_options, read_config

USER_ERROR, FAULT, INTERRUPTED = 2, 1, 130


def main(arguments: Sequence[str]) -> int:
    """Train as the arguments say; the exit status."""
    if any(a in ("help", "-h", "--help") for a in arguments):
        print(describe_options())
        return 0
    debug = "debug=true" in arguments
    try:
        config = read_config(arguments)
        from disagmoe.train.run import prepare, start  # torch is loaded only for a command that makes sense

        prepared = prepare(config)
    except ValueError as error:
        return _failed(error, USER_ERROR, debug)
    first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    try:
        history = start(prepared, print if first else lambda line: None)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    except ValueError as error:
        return _failed(error, USER_ERROR, debug)
    except Exception as error:
        return _failed(error, FAULT, debug)
    if first and not history:
        print(f"nothing to do: {config.folder} has all {config.steps} steps; more with steps=, afresh with resume=none")
    return 0


def _failed(error: Exception, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    print(f"error: {str(error).splitlines()[0] if str(error) else type(error).__name__}", file=sys.stderr)
    return status


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a lane that waits for a lost peer must not keep the process
