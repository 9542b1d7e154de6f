"""What the executor itself costs per operation: `python -m tests.runtime.overhead`.

Without exchanges: the Program of one attention worker whose operations do nothing. With them: two ranks, a model so
small that its compute is next to nothing, the whole step divided by the operations of a rank.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from disagmoe.plan.af_pipe import af_pipe_program
from disagmoe.runtime.child import Context
from disagmoe.runtime.executor import Executor
from disagmoe.runtime.launch import spawn
from disagmoe.runtime.script import script_of
from disagmoe.runtime.step import StepRunner
from tests.runtime.training_cases import Case

REPEATS = 7


def bare_s() -> float:
    """Seconds per operation where every operation returns at once; the best of several steps."""
    program = af_pipe_program(p=1, layers=4, m=32, group=4, order="comm_stage")
    script = script_of(program, 0)
    runner = Executor(script, lambda task: None, device=torch.device("cpu"))
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        runner.step()
        times.append(time.perf_counter() - begin)
    runner.close()
    return min(times) / len(script.tasks())


def whole_s(context: Context, case: Case) -> float:
    """Seconds per operation of a whole step on this rank; the best of several steps."""
    tokens = case.tokens()
    with StepRunner(context, case.plan, case.model, case.cut, case.options) as runner:
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            runner.step(lambda wanted: tokens[wanted.start : wanted.stop])
            times.append(time.perf_counter() - begin)
        return min(times) / len(runner.executor.script.tasks())


def main() -> None:
    """Print both."""
    case = Case(layers=4, microbatches=16, sequences=16, seq=2)
    print(f"executor alone: {bare_s() * 1e6:.0f} us per operation")
    for ranks, shape in ((2, {}), (4, {"m": 2, "n": 2})):
        found = spawn(ranks, whole_s, (replace(case, **shape),))
        print(f"whole step on {ranks} ranks: {max(found) * 1e6:.0f} us per operation")


if __name__ == "__main__":
    main()
