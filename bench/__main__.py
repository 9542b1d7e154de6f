"""Entry point of `python -m bench`."""

import signal
import sys
from types import FrameType

from bench.cli import main

TERMINATED = 143


def terminate(number: int, frame: FrameType | None) -> None:
    """Leave by an exception, so that an unfinished build is removed."""
    raise SystemExit(TERMINATED)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminate)
    sys.exit(main())
