"""Settings, each with the place it came from: flag > environment > file > default. No global; whoever needs one gets it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llama_ckpt.errors import BadInput

ENVIRONMENT_PREFIX = "LLAMA_CKPT_"
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kmgt]?)(ib|b)?")
_COUNT = re.compile(r"[0-9]{1,12}")
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhdw]?)")
DEFAULTS: Mapping[str, str] = {
    "database_url": "",
    "store": "",
    "drop_page_cache": "false",
    "min_match_tokens": "16",
    "delta_depth": "8",
    "stale_grace": "24h",
    "ghost_grace": "1h",
    "max_age": "",
    "max_idle": "",
    "max_bytes": "",
    "max_count": "",
    "max_bytes_per_model": "",
    "max_count_per_model": "",
    "max_bytes_per_label": "",
    "max_count_per_label": "",
    "keep_last_per_model": "",
    "keep_last_per_label": "",
    "min_free": "",
    "high_water": "100%",
    "low_water": "100%",
    "order": "value",
    "half_life": "6h",
}
# What the section [policy] of the settings file may hold; the same names work without a section.
_OF_POLICY = tuple(DEFAULTS)[tuple(DEFAULTS).index("stale_grace") :]


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and its origin: "flag", "environment NAME", "file PATH" or "default"."""

    value: str
    origin: str


def config_file(environment: Mapping[str, str]) -> Path:
    """The settings file: what LLAMA_CKPT_CONFIG names, or config.toml in the user's configuration folder.

    Raises:
        BadInput: the environment names a file that is not there.
    """
    import platformdirs

    named = environment.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    if named is None:
        return platformdirs.user_config_path("llama-ckpt") / "config.toml"
    if not Path(named).is_file():
        raise BadInput(what="LLAMA_CKPT_CONFIG", value=named, reason="there is no such file")
    return Path(named)


def settings(flags: Mapping[str, str | None], environment: Mapping[str, str], file: Path | None) -> dict[str, Setting]:
    """Every setting with its origin. `file` is a TOML file; one that is not there counts as empty.

    Raises:
        BadInput: the file is no TOML, or has a key that is no setting or a value that is not text, number or flag.
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
        if name not in _OF_POLICY:
            raise BadInput(what=f"policy in {file}", value=name, reason=f"known are {', '.join(_OF_POLICY)}")
        if name in loaded:
            raise BadInput(what=f"setting in {file}", value=name, reason="it stands in [policy] and outside of it")
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
    """The database's password where the URL has none: LLAMA_CKPT_DATABASE_PASSWORD, or the first line of the file that
    LLAMA_CKPT_DATABASE_PASSWORD_FILE names. It is no setting: it is never shown, and never read from the settings file.

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


def seconds(text: str, what: str) -> float:
    """A duration such as `90`, `90s`, `15m`, `24h`, `7d`, `2w`, in seconds.

    Raises:
        BadInput: it is none.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise BadInput(what=what, value=text, reason="expected a duration such as 90s, 15m, 24h, 7d or 2w")
    return float(match[1]) * _UNITS[match[2]]


def size_bytes(text: str, what: str) -> int:
    """A size such as `500MB`, `10GiB` or `4096`, in bytes: kB, MB, GB, TB by 1,000; KiB, MiB, GiB, TiB (or K, M, G, T) by 1,024.

    Raises:
        BadInput: it is none.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise BadInput(what=what, value=text, reason="expected a size such as 500MB, 10GiB or 4096")
    power = "kmgt".index(match[2]) + 1 if match[2] else 0
    return int(float(match[1]) * float(1000 if match[3] == "b" and match[2] else 1024) ** power)


def count(text: str, what: str) -> int:
    """A whole number from 0 on.

    Raises:
        BadInput: it is none.
    """
    if not _COUNT.fullmatch(text.strip()):
        raise BadInput(what=what, value=text, reason="expected a whole number from 0 on")
    return int(text)


def flag(text: str, what: str) -> bool:
    """A yes or no.

    Raises:
        BadInput: it is neither.
    """
    word = text.strip().lower()
    if word not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise BadInput(what=what, value=text, reason="expected true or false")
    return word in ("1", "true", "yes", "on")
