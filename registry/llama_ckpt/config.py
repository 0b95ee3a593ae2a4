"""Settings: which there are, where the value of each comes from (flag > environment > file > default), and how its text is read.

No setting is kept in a global: a function that needs one takes it as an argument.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_ckpt.errors import BadInput
from llama_ckpt.retention.policy import SETTINGS, Kind, Order, Policy, PolicySetting

ENVIRONMENT_PREFIX = "LLAMA_CKPT_"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kmgt]?)(ib|b)?")
_COUNT = re.compile(r"[0-9]{1,12}")
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhdw])")
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%")
_OTHER_DEFAULTS = {
    "database_url": "",
    "store": "",
    "drop_page_cache": "false",
    "min_match_tokens": "16",
    "delta_depth": "8",
}
_POLICY_DEFAULTS = {declared.name: declared.default for declared in SETTINGS}
DEFAULTS: Mapping[str, str] = _OTHER_DEFAULTS | _POLICY_DEFAULTS


@dataclass(frozen=True, slots=True)
class Setting:
    """The text of one setting and its origin: "flag", "environment NAME", "file PATH" or "default"."""

    value: str
    origin: str


def config_file(environment: Mapping[str, str]) -> Path | None:
    """The path of the settings file: what LLAMA_CKPT_CONFIG names, or config.toml in the user's configuration folder. None if
    neither exists because the user has no home folder.

    Raises:
        BadInput: LLAMA_CKPT_CONFIG names a file that does not exist.
    """
    import platformdirs

    named = environment.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    if named is None:
        try:
            return platformdirs.user_config_path("llama-ckpt") / "config.toml"
        except RuntimeError:  # no HOME, and no entry for this user in the password file
            return None
    if not Path(named).is_file():
        raise BadInput(what="LLAMA_CKPT_CONFIG", value=named, reason="this file does not exist")
    return Path(named)


def settings(flags: Mapping[str, str | None], environment: Mapping[str, str], file: Path | None) -> dict[str, Setting]:
    """Every setting with its origin. `file` is a TOML file; if it does not exist, it counts as empty.

    The section [policy] of the file takes the settings of the policy; they work outside of a section, too. The environment
    variable of a setting is its name in capitals after LLAMA_CKPT_.

    Raises:
        BadInput: the file is not TOML, or has an unknown key, or a value that is not a text, a number or true/false.
    """
    from_file = _read(file)
    merged = {}
    for name, default in DEFAULTS.items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if (flag := flags.get(name)) is not None:
            merged[name] = Setting(flag, "flag")
        elif variable in environment:
            merged[name] = Setting(environment[variable], f"environment {variable}")
        elif name in from_file:
            merged[name] = Setting(from_file[name], f"file {file}")
        else:
            merged[name] = Setting(default, "default")
    return merged


def _read(file: Path | None) -> dict[str, str]:
    if file is None:
        return {}
    try:
        loaded = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadInput(what="settings file", value=str(file), reason=str(error)) from error
    section = loaded.pop("policy", {})
    if not isinstance(section, dict):
        raise BadInput(what=f"setting policy in {file}", value=section, reason="it is a section: [policy]")
    for name in section:
        if name not in _POLICY_DEFAULTS:
            raise BadInput(what=f"policy in {file}", value=name, reason=f"known are {', '.join(_POLICY_DEFAULTS)}")
        if name in loaded:
            raise BadInput(what=f"setting in {file}", value=name, reason="it is in [policy] and outside of it")
    loaded |= section
    for name, value in loaded.items():
        if name not in DEFAULTS:
            raise BadInput(what=f"setting in {file}", value=name, reason=f"known are {', '.join(DEFAULTS)}")
        if not isinstance(value, str | int | float):
            raise BadInput(
                what=f"setting {name} in {file}",
                value=type(value).__name__,
                reason="expected text, a number or true/false",
            )
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in loaded.items()}


def database_password(environment: Mapping[str, str]) -> str | None:
    """The database's password if the URL has none: LLAMA_CKPT_DATABASE_PASSWORD, or the first line of the file that
    LLAMA_CKPT_DATABASE_PASSWORD_FILE names; None if neither is set. It is not a setting: it is never shown, and never read
    from the settings file.

    Raises:
        BadInput: the file cannot be read.
    """
    given = environment.get(f"{ENVIRONMENT_PREFIX}DATABASE_PASSWORD")
    named = environment.get(f"{ENVIRONMENT_PREFIX}DATABASE_PASSWORD_FILE")
    if given is not None or named is None:
        return given
    try:
        return Path(named).read_text(encoding="utf-8").split("\n", 1)[0].rstrip("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(what="password file", value=named, reason=str(error)) from error


def policy_of(values: Mapping[str, str]) -> Policy:
    """The policy that the texts of settings describe; a setting that is empty or missing keeps its default. Other settings among
    `values` are ignored.

    Raises:
        BadInput: a text cannot be read (the error names the option), or a value is out of range.
    """
    read: dict[str, Any] = {}
    for declared in SETTINGS:
        if text := values.get(declared.name, "").strip():
            form, attribute = _form_of(declared, text)
            read[attribute] = _READERS[form](text, "--" + declared.name.replace("_", "-"))
    return Policy(**read)


def _form_of(declared: PolicySetting, text: str) -> tuple[Kind, str]:
    """The form in which a text is written: a share if it ends in %, if the setting takes one."""
    as_share = [form for form in declared.forms if form[0] is Kind.SHARE]
    return as_share[0] if as_share and text.endswith("%") else declared.forms[0]


def seconds(text: str, what: str) -> float:
    """Reads a duration such as `90s`, `15m`, `24h`, `7d` or `2w`, in seconds. `what` names it in the error. A number needs its
    unit, in small letters, since 7 could be days and 1M a month; only 0 needs none.

    Raises:
        BadInput: the text is not a duration.
    """
    stripped = text.strip()
    if stripped == "0":
        return 0.0
    match = _DURATION.fullmatch(stripped)
    if match is None:
        raise BadInput(
            what=what, value=text, reason="expected a duration with its unit, such as 90s, 15m, 24h, 7d or 2w"
        )
    return float(match[1]) * _UNITS[match[2]]


def size_bytes(text: str, what: str) -> int:
    """Reads a size such as `500MB`, `10GiB` or `4096`, in bytes. kB, MB, GB, TB are powers of 1,000; KiB, MiB, GiB, TiB (or K, M,
    G, T) are powers of 1,024. `what` names it in the error.

    Raises:
        BadInput: the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise BadInput(what=what, value=text, reason="expected a size such as 500MB, 10GiB or 4096")
    power = "kmgt".index(match[2]) + 1 if match[2] else 0
    return int(float(match[1]) * float(1000 if match[3] == "b" and match[2] else 1024) ** power)


def count(text: str, what: str) -> int:
    """Reads a whole number, 0 or more. `what` names it in the error.

    Raises:
        BadInput: the text is not such a number.
    """
    if not _COUNT.fullmatch(text.strip()):
        raise BadInput(what=what, value=text, reason="expected a whole number, 0 or more")
    return int(text)


def flag(text: str, what: str) -> bool:
    """Reads true or false: 1, true, yes, on; 0, false, no, off. `what` names it in the error.

    Raises:
        BadInput: the text is none of these.
    """
    word = text.strip().lower()
    if word not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise BadInput(what=what, value=text, reason="expected true or false")
    return word in ("1", "true", "yes", "on")


def share(text: str, what: str) -> float:
    """Reads a share such as `90%`, as a number from 0 to 1. `what` names it in the error.

    Raises:
        BadInput: the text is not a share of at most 100 %.
    """
    match = _PERCENT.fullmatch(text.strip())
    if match is None or float(match[1]) > 100:
        raise BadInput(what=what, value=text, reason="expected a share such as 90%")
    return float(match[1]) / 100


def _order(text: str, what: str) -> Order:
    if text.lower() not in list(Order):
        raise BadInput(what=what, value=text, reason=f"expected one of {', '.join(Order)}")
    return Order(text.lower())


_READERS: Mapping[Kind, Callable[[str, str], Any]] = {
    Kind.DURATION: seconds,
    Kind.SIZE: size_bytes,
    Kind.COUNT: count,
    Kind.SHARE: share,
    Kind.ORDER: _order,
}
