"""`Policy`, and the one declaration of each of its settings. Needs no numpy: `llama-ckpt --help` reads the declarations.

A field of `Policy` declares in its metadata the setting that users write: its name, how its text is read, and its help. The known
settings and their defaults, the section [policy], the environment variables, the options of the commands with their help, and
the limits that doctor lists and that saves keep follow from these declarations (`settings_of`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from typing import Any

from llama_ckpt.errors import BadInput
from llama_ckpt.gc_values import Disk


class Order(StrEnum):
    """What is pruned first when a limit is exceeded: the least valuable, the least recently or least often used, the oldest."""

    VALUE = "value"
    LRU = "lru"
    LFU = "lfu"
    OLDEST = "oldest"


class Kind(StrEnum):
    """What the text of a setting is: 15m, 50GB, 12, 90%, or one of a few words."""

    DURATION = "duration"
    SIZE = "size"
    COUNT = "count"
    SHARE = "share"
    ORDER = "order"


class Step(StrEnum):
    """The step that reads a setting, and whose commands have an option for it."""

    PRUNE = "prune"
    GC = "gc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What one field of `Policy` declares about its setting. Two fields with the same `name` are two forms of one setting: users
    write one of them, and the first field has the help. `kept_by_saves`: a save makes room before it writes, or is refused.
    """

    name: str
    kind: Kind
    help: str
    step: Step
    kept_by_saves: bool


def setting(
    name: str, kind: Kind, text: str, *, step: Step = Step.PRUNE, kept_by_saves: bool = False
) -> dict[str, Declaration]:
    """The metadata of a field of `Policy`. `text` is one sentence that says what the value does; the help of its option
    adds the default.
    """
    declared = Declaration(name=name, kind=kind, help=text, step=step, kept_by_saves=kept_by_saves)
    return {"setting": declared}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How long checkpoints stay, and how much space they may take. Seconds, bytes, counts; None: no limit.

    `max_age_s` counts from the save, `max_idle_s` from the last use. `max_bytes` and `max_count` hold for the registry, and
    with `_per_model` and `_per_label` for each model or label. The newest `keep_last_*` of each model or label always stay.
    `min_free` bytes of the file system stay free, or `min_free_share` of it; of both, the larger. Pruning starts when usage
    exceeds `high_water` of a limit, and ends at `low_water` of it. In the order "value" a hit counts half after `half_life_s`.

    Raises:
        BadInput: a value is out of range.
    """

    stale_grace_s: float = field(
        default=24 * 3600.0,
        metadata=setting(
            "stale_grace",
            Kind.DURATION,
            "Keep STALE checkpoints this long before deleting their files; until then unprune can bring them back."
            " With 0s, a prune cannot be undone after the next gc.",
            step=Step.GC,
        ),
    )
    ghost_grace_s: float = field(
        default=3600.0,
        metadata=setting(
            "ghost_grace",
            Kind.DURATION,
            "Keep files that the database does not know (ghosts) at least this long. A save that is still running looks like"
            " one: a grace shorter than your longest save can delete its file.",
            step=Step.GC,
        ),
    )
    max_age_s: float | None = field(
        default=None,
        metadata=setting("max_age", Kind.DURATION, "Prune checkpoints saved longer ago than this, e.g. 30d."),
    )
    max_idle_s: float | None = field(
        default=None,
        metadata=setting("max_idle", Kind.DURATION, "Prune checkpoints not used for longer than this, e.g. 7d."),
    )
    max_bytes: int | None = field(
        default=None,
        metadata=setting("max_bytes", Kind.SIZE, "Limit the bytes of all checkpoints, e.g. 50GB.", kept_by_saves=True),
    )
    max_count: int | None = field(
        default=None, metadata=setting("max_count", Kind.COUNT, "Limit the number of checkpoints.")
    )
    max_bytes_per_model: int | None = field(
        default=None, metadata=setting("max_bytes_per_model", Kind.SIZE, "Limit the bytes of each model's checkpoints.")
    )
    max_count_per_model: int | None = field(
        default=None,
        metadata=setting("max_count_per_model", Kind.COUNT, "Limit the number of each model's checkpoints."),
    )
    max_bytes_per_label: int | None = field(
        default=None, metadata=setting("max_bytes_per_label", Kind.SIZE, "Limit the bytes of each label's checkpoints.")
    )
    max_count_per_label: int | None = field(
        default=None,
        metadata=setting("max_count_per_label", Kind.COUNT, "Limit the number of each label's checkpoints."),
    )
    keep_last_per_model: int = field(
        default=0,
        metadata=setting(
            "keep_last_per_model",
            Kind.COUNT,
            "Never prune the newest N checkpoints of each model, even over a limit, until they expire.",
        ),
    )
    keep_last_per_label: int = field(
        default=0,
        metadata=setting(
            "keep_last_per_label",
            Kind.COUNT,
            "Never prune the newest N checkpoints of each label, even over a limit, until they expire.",
        ),
    )
    min_free: int | None = field(
        default=None,
        metadata=setting(
            "min_free",
            Kind.SIZE,
            "Prune until this much of the file system is free once gc has deleted the files, e.g. 20GB or 10%.",
            kept_by_saves=True,
        ),
    )
    min_free_share: float | None = field(default=None, metadata=setting("min_free", Kind.SHARE, "", kept_by_saves=True))
    high_water: float = field(
        default=1.0,
        metadata=setting(
            "high_water",
            Kind.SHARE,
            "Start pruning when usage exceeds this share of a limit in bytes or number, e.g. 90%.",
        ),
    )
    low_water: float = field(
        default=1.0,
        metadata=setting(
            "low_water",
            Kind.SHARE,
            "Once pruning has started, prune until usage is at or below this share of the limit, e.g. 80%.",
        ),
    )
    order: Order = field(
        default=Order.VALUE,
        metadata=setting(
            "order",
            Kind.ORDER,
            "What to prune first when a limit is exceeded: value (least evaluation time saved per byte), lru (unused for the"
            " longest time), lfu (fewest hits) or oldest.",
        ),
    )
    half_life_s: float = field(
        default=6 * 3600.0,
        metadata=setting(
            "half_life",
            Kind.DURATION,
            "With value as the order: hits count half after a checkpoint was unused for this time.",
        ),
    )

    def __post_init__(self) -> None:
        if not 0 < self.low_water <= self.high_water <= 1:
            reason = "expected 0 < low_water <= high_water <= 1"
            raise BadInput(what="low_water, high_water", value=f"{self.low_water}, {self.high_water}", reason=reason)
        if not 0 < self.half_life_s < 1e10:
            raise BadInput(what="half_life", value=self.half_life_s, reason="give a time above 0")
        if self.min_free_share is not None and not 0 <= self.min_free_share < 1:
            raise BadInput(what="min_free", value=f"{self.min_free_share:%}", reason="give less than 100 %")

    def limit_names(self) -> list[str]:
        """The names of the limits that are set, as users write them."""
        set_names = [declared.name for part, declared in _declared(type(self)) if _is_limit(part) and self._has(part)]
        return list(dict.fromkeys(set_names))

    def limits_of_saves(self) -> list[str]:
        """The limits that are set and that every save keeps, with their values: "max_bytes (50000000)", "min_free (10%)"."""
        return [
            f"{declared.name} ({text_of(getattr(self, part.name), declared.kind)})"
            for part, declared in _declared(type(self))
            if declared.kept_by_saves and self._has(part)
        ]

    def _has(self, part: Field[Any]) -> bool:
        return getattr(self, part.name) is not None

    def floor_bytes(self, disk: Disk) -> int:
        """Bytes of the file system that must stay free."""
        return max(self.min_free or 0, round((self.min_free_share or 0.0) * disk.total))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySetting:
    """A setting of the policy as users write it. `forms` are the kinds of text that it takes, each with the field of `Policy`
    that it sets. `default` is text, empty if nothing is set; `help` ends with it. `is_limit`: nothing is limited by default.
    """

    name: str
    help: str
    step: Step
    forms: tuple[tuple[Kind, str], ...]
    default: str
    is_limit: bool


def settings_of(policy: type[Policy]) -> tuple[PolicySetting, ...]:
    """The settings that the fields of a policy declare, in the order of the fields."""
    forms: dict[str, list[tuple[Field[Any], Declaration]]] = {}
    for part, declared in _declared(policy):
        forms.setdefault(declared.name, []).append((part, declared))
    return tuple(_setting_of(parts) for parts in forms.values())


def _setting_of(parts: list[tuple[Field[Any], Declaration]]) -> PolicySetting:
    first, declared = parts[0]
    value: Any = first.default
    default = text_of(value, declared.kind) if value else ""
    return PolicySetting(
        name=declared.name,
        help=f"{declared.help.removesuffix('.')} (default: {default})." if default else declared.help,
        step=declared.step,
        forms=tuple((form.kind, part.name) for part, form in parts),
        default=default,
        is_limit=_is_limit(first),
    )


def _declared(policy: type[Policy]) -> Iterator[tuple[Field[Any], Declaration]]:
    return ((part, part.metadata["setting"]) for part in fields(policy))


def _is_limit(part: Field[Any]) -> bool:
    return part.default is None


def text_of(value: float | str, kind: Kind) -> str:
    """A value as users write it: 24h, 50000000, 100%, lru. Durations are in the largest of h, m and s that divides them."""
    match kind:
        case Kind.DURATION:
            unit, length = next(((u, n) for u, n in (("h", 3600), ("m", 60)) if float(value) % n == 0), ("s", 1))
            return f"{float(value) / length:g}{unit}"
        case Kind.SHARE:
            return f"{float(value) * 100:g}%"
    return str(value)


SETTINGS = settings_of(Policy)
