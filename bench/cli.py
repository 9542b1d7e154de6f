"""`python -m bench`: from a command line to one run, or to the jobs of a sweep.

Decides what people see when something is wrong: one line on stderr and exit
status 2 for a mistake in the command, a traceback and 1 for a fault of the suite.
A job of a sweep that fails does not stop the others; the sweep then exits with 1
and names it. Jobs may run in other processes (joblib, submitit), so each leaves a
small report in a directory that the command reads at the end.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench import at_hand
from bench.command import CONF, FAULT, INTERRUPTED, USER_ERROR, complain
from bench.config import RunConfig, resolve
from bench.overrides import explain, rewrite
from bench.publish import LockTimeout
from bench.run import Call, Outcome, execute


@dataclass(frozen=True)
class JobReport:
    """How one job ended. `status` is published, skipped, refused (the user's mistake) or failed."""

    number: int
    overrides: list[str]
    status: str
    reason: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Of processes that torchrun or srun started the first one does."""
    if at_hand.launched() is None:
        return _main(arguments)
    from disagmoe.runtime.crew import under_launcher  # needs torch, as whoever started several processes has

    return under_launcher(lambda crew: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not (CONF / "config.yaml").is_file():
        return complain(f"no configuration in {CONF}: run from a checkout of the suite")
    # Slurm's nodes share the working directory, not /tmp.
    shared = Path.cwd() if any("submitit_slurm" in argument for argument in given) else None
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=shared) as spool:
        error = _run_hydra(given, spool)
        reports = _reports(Path(spool))
    return _conclude(reports, error)


def _run_hydra(arguments: Sequence[str], spool: str) -> tuple[int, str] | None:
    """Run Hydra; (exit status, line) where it did not get to the end."""
    kept = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    try:
        directories = [f"hydra.run.dir={spool}", f"hydra.sweep.dir={spool}", "hydra.sweep.subdir=."]
        sys.argv = ["bench", *rewrite(arguments), *directories]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us instead of being printed
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        return USER_ERROR, explain(error, CONF)
    except KeyboardInterrupt:
        return INTERRUPTED, "interrupted"
    except Exception as error:
        traceback.print_exc()
        return FAULT, f"{type(error).__name__}: {error}"
    finally:
        sys.argv = kept[0]
        os.environ.pop("HYDRA_FULL_ERROR", None)
        if kept[1] is not None:
            os.environ["HYDRA_FULL_ERROR"] = kept[1]
    return None


def job(values: DictConfig) -> None:
    """One run. Errors end in the report, not in Hydra, which would stop a sweep."""
    hydra_config = HydraConfig.get()
    sweep = hydra_config.mode == RunMode.MULTIRUN
    number = int(hydra_config.job.num) if sweep else 0
    overrides = cast(list[str], OmegaConf.to_container(hydra_config.overrides.task, resolve=False))
    status, reason = _attempt(values, hydra_config, overrides, sweep)
    path = Path(hydra_config.runtime.output_dir) / f"job-{number}.json"
    path.write_text(json.dumps(asdict(JobReport(number, overrides, status, reason))), encoding="utf-8")


def _attempt(values: DictConfig, hydra_config: Any, overrides: Sequence[str], sweep: bool) -> tuple[str, str]:
    """Status and reason of one run."""
    call = Call(
        command=("python", "-m", "bench", *overrides),
        overrides=overrides,
        tables=not sweep,
        bar=not sweep or "Basic" in str(hydra_config.launcher.get("_target_")),
    )
    choices: dict[str, str | None] = {str(group): option for group, option in hydra_config.runtime.choices.items()}
    try:
        plain = cast(dict[str, Any], OmegaConf.to_container(values, resolve=True))
        if plain.get("backend") == "measure":
            plain, choices = at_hand.adapt(plain, choices, overrides)
        outcome = _execute(resolve(plain, choices, sweep=sweep), call)
    except (ValueError, OSError, OmegaConfBaseException) as error:
        if values.get("debug") is True:
            traceback.print_exc()
        return "refused", explain(error, CONF)
    except LockTimeout as error:
        return "failed", str(error)
    except Exception as error:
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {error}"
    if outcome.failures:
        count = len(outcome.failures)
        return "failed", f"{count} row{'s' * (count > 1)} failed in {outcome.directory}: {outcome.failures[0]}"
    return "skipped" if outcome.skipped else "published", ""


def _execute(config: RunConfig, call: Call) -> Outcome:
    """A study or a comparison, as the configuration asks."""
    if config.study is None:
        return execute(config, call)
    from bench import study_run

    return study_run.execute(config, call)


def _reports(spool: Path) -> list[JobReport]:
    """The reports of all jobs that came to an end, by number."""
    reports = [JobReport(**json.loads(path.read_text(encoding="utf-8"))) for path in spool.glob("job-*.json")]
    return sorted(reports, key=lambda report: report.number)


def _conclude(reports: Sequence[JobReport], error: tuple[int, str] | None) -> int:
    """Say what failed; returns the exit status."""
    bad = [report for report in reports if report.status in ("refused", "failed")]
    if len(reports) > 1:
        counts = ", ".join(
            f"{sum(report.status == status for report in reports)} {word}"
            for status, word in (("published", "done"), ("skipped", "already there"))
        )
        print(f"sweep: {len(reports)} jobs: {counts}, {len(bad)} failed", flush=True)
        for report in bad:
            print(f"error: job {report.number} ({' '.join(report.overrides)}): {report.reason}", file=sys.stderr)
    elif bad:
        print(f"error: {bad[0].reason}", file=sys.stderr)
    if error is not None:
        status, line = error
        print(line if status == INTERRUPTED else f"error: {line}", file=sys.stderr)
        return status
    if len(reports) == 1 and bad:
        return USER_ERROR if bad[0].status == "refused" else FAULT
    return FAULT if bad else 0
