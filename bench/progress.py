"""How a run shows that it lives: one transient line on a terminal, nothing elsewhere.

Short runs show nothing; a bar appears once a run has taken longer than two
seconds. It goes to stderr, so that tables can be redirected.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

QUIET_S = 2.0


class Bar:
    """Counts parts of a run by the label they report; usable as `progress` of an evaluation.

    A report is "<part>" or "<part>, <detail>": a part not seen before completes
    the one before it. `total` is the number of parts.
    """

    def __init__(self, total: int, *, enabled: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._enabled = enabled and self._console.is_terminal
        self._started_s = time.monotonic()
        self._total = total
        self._seen: dict[str, None] = {}
        self._progress: Progress | None = None

    def __call__(self, text: str) -> None:
        """Report what is being done now."""
        self._seen.setdefault(text.split(",")[0])
        if not self._enabled or time.monotonic() - self._started_s < QUIET_S:
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("  {task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._progress.add_task(text, total=self._total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], description=text, completed=len(self._seen) - 1)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
