"""The command line before and after Hydra: what we add to its grammar, and its errors in one line.

`model=`, `cluster=` and `calibration=` take a path as well as a name, the latter two
also a name of the user's own (conf.local/), and
`system.<name>.<field>=` needs no plus sign although no file lists every system, and
`gantt_workers=` no brackets.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from bench.choices import FROM_FILE, MODEL_FROM_FILE
from disagmoe.specs import fields as read

PATH_OPTION: Mapping[str, str] = {"model": MODEL_FROM_FILE, "cluster": FROM_FILE, "calibration": FROM_FILE}
"""Groups that take a path, and the option of each that carries it."""

_AMBIGUOUS = re.compile(r"Ambiguous value for argument '(.*?)' 1\. ")
_UNKNOWN = re.compile(r"Could not override '([^'.]+)'")


def rewrite(arguments: Iterable[str]) -> list[str]:
    """Arguments as Hydra understands them, flags before overrides. Raises ValueError where a choice cannot be meant."""
    flags: list[str] = []
    rewritten: list[str] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if argument.startswith("-") or not (equals or argument.startswith("~")):
            flags.append(argument)
        elif key in PATH_OPTION:
            rewritten += _choice(key, value)
        elif key == "system":
            raise ValueError(
                f"{argument}: systems=[{value}] chooses what is compared, "
                "system.<name>.<field>=<value> sets an option of one"
            )
        elif key == "gantt_workers" and "," in value and value[0] not in "['\"":
            rewritten.append(f"{key}=[{value}]")
        elif key.startswith("system."):
            rewritten.append(f"++{argument}")
        else:
            rewritten.append(argument)
    return flags + rewritten


def _choice(group: str, value: str) -> list[str]:
    """Overrides that choose `value` (names or paths, several in a sweep) in a group."""
    bare = _unquoted(value)
    values = [value] if bare is None else [bare]
    if bare is None:
        values = value.split(",")
    own = {} if group == "model" else {k: str(v) for k, v in read.own(group).items() if k not in read.shipped(group)}
    values = [own.get(item, item) for item in values]
    paths = [item for item in values if _is_path(item)]
    if not paths:
        return [f"{group}={value}"]
    if len(paths) < len(values):
        raise ValueError(f"{group}={value}: a sweep takes either names or paths, not both")
    return [f"{group}={PATH_OPTION[group]}", f"{group}.path={','.join(map(_quoted, paths))}"]


def _is_path(value: str) -> bool:
    return "/" in value or value.lower().endswith((".json", ".yaml", ".yml"))


def _unquoted(value: str) -> str | None:
    """The inside of a value in quotes, None where it has none."""
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return None


def _quoted(value: str) -> str:
    """A text that Hydra's grammar takes as it is."""
    escaped = value.replace("\\'", "\\\\'").replace("'", "\\'")
    return f"'{escaped}'"


def explain(error: Exception, conf: Path) -> str:
    """An error as one line; those of Hydra and OmegaConf in our words, with what is allowed."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_option(error.missing_cfg_file, error.options or ())
    if isinstance(error, OverrideParseException):
        if "=" not in error.override:
            return f"{error.override!r} is not of the form setting=value; settings: {', '.join(settings(conf))}"
        reason = str(error).splitlines()[0]
        return f"cannot read {error.override!r}: {reason} (put a value with special characters in quotes: key='a=b')"
    text = " ".join(str(error).split())
    if isinstance(error, HydraException) and (match := _AMBIGUOUS.match(text)):
        key, _, value = match[1].partition("=")
        return (
            f"{match[1]} has several values: quote them for one text ({key}='{value}'), "
            f"use {key}=[{value}] for a list, or add -m for a sweep"
        )
    if isinstance(error, HydraException) and (match := _UNKNOWN.match(text)):
        return _unknown_setting(match[1], settings(conf))
    if isinstance(error, OmegaConfBaseException):
        return text.split(" full_key:")[0]
    return text


def settings(conf: Path) -> list[str]:
    """The top-level settings of conf/config.yaml, groups included."""
    content = yaml.safe_load((conf / "config.yaml").read_text(encoding="utf-8"))
    groups = [key for entry in content.pop("defaults") if isinstance(entry, dict) for key in entry]
    content.pop("hydra")
    return [key for key in groups if not key.startswith("override ")] + list(content)


def _missing_option(missing: str, options: Sequence[str]) -> str:
    group, _, name = missing.rpartition("/")
    if not group:
        return f"no configuration {name!r}"
    names = [option for option in options if option != PATH_OPTION.get(group)]
    more = ", or a path to a file" if group in PATH_OPTION else ""
    return f"unknown {group} {name!r}; known: {', '.join(names) or 'none'}{more}"


def _unknown_setting(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"no setting {key!r}{hint}; settings: {', '.join(known)}"
