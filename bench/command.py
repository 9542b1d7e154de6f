"""What the commands around `python -m bench` share: how they read settings, and how they end.

Decides the exit status and the one line on stderr: a mistake in the command is 2, a
fault of the suite is 1 with its traceback, Ctrl-C is 130. Settings are those of
conf/config.yaml, read as `python -m bench` reads them.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench.choices import FROM_FILE
from bench.config import RunConfig, resolve
from bench.identity import ROOT
from bench.overrides import explain, rewrite

CONF = ROOT / "conf"
USER_ERROR, FAULT, INTERRUPTED = 2, 1, 130

# conf/hydra/launcher holds our values for launchers whose plugins bring a schema of the same name: both are meant.
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")

for _group in ("cluster", "calibration"):  # conf/model/hf.yaml is the same for models
    ConfigStore.instance().store(group=_group, name=FROM_FILE, node={"path": "???"}, provider="bench")


def run_command(doc: str | None, arguments: Sequence[str] | None, work: Callable[[list[str]], bool]) -> int:
    """Do the work of a command; the exit status. `work` says whether all is well; `doc` is what --help prints."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if any(argument in ("-h", "--help") for argument in given):
        print(doc)
        return 0
    try:
        return 0 if work(given) else FAULT
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        return complain(explain(error, CONF))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        traceback.print_exc()
        return complain(f"{type(error).__name__}: {error}", FAULT)


def complain(line: str, status: int = USER_ERROR) -> int:
    """Say what is wrong; the exit status."""
    print(f"error: {line}", file=sys.stderr)
    return status


def configuration(overrides: Sequence[str]) -> RunConfig:
    """The resolved run of `python -m bench` with these overrides."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        composed = compose("config", overrides=rewrite(overrides), return_hydra_config=True)
    choices = {str(group): option for group, option in composed.hydra.runtime.choices.items()}
    values = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False))
    del values["hydra"]
    return resolve(values, choices)
