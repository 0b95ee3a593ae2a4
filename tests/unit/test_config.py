"""Settings and where each came from."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from llama_ckpt.config import DEFAULTS, Setting, database_password, flag, policy_of, seconds, settings
from llama_ckpt.errors import BadInput
from llama_ckpt.retention.policy import SETTINGS, Kind, Order, Policy

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "config.toml"


def test_without_anything_every_setting_is_the_default():
    found = settings({}, {}, None)
    assert found == {name: Setting(value, "default") for name, value in DEFAULTS.items()}
    assert found["stale_grace"].value == "24h"


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(file):
    file.write_text('max_age = "1d"\n')
    variable = {"LLAMA_CKPT_MAX_AGE": "2d"}
    assert settings({"max_age": "3d"}, variable, file)["max_age"] == Setting("3d", "flag")
    assert settings({"max_age": None}, variable, file)["max_age"] == Setting("2d", "environment LLAMA_CKPT_MAX_AGE")
    assert settings({}, {}, file)["max_age"] == Setting("1d", f"file {file}")
    assert settings({}, {}, None)["max_age"] == Setting("", "default")


def test_each_setting_has_its_own_origin(file):
    file.write_text('ghost_grace = "5m"\n')
    found = settings({"store": "/flag"}, {"LLAMA_CKPT_DATABASE_URL": "sqlite://"}, file)
    origins = {name: setting.origin for name, setting in found.items()}
    assert origins.pop("store") == "flag"
    assert origins.pop("database_url") == "environment LLAMA_CKPT_DATABASE_URL"
    assert origins.pop("ghost_grace") == f"file {file}"
    assert set(origins.values()) == {"default"}


def test_a_value_that_is_set_to_nothing_counts_as_set(file):
    file.write_text('store = "/file"\n')
    assert settings({}, {"LLAMA_CKPT_STORE": ""}, file)["store"] == Setting("", "environment LLAMA_CKPT_STORE")
    assert settings({"store": ""}, {"LLAMA_CKPT_STORE": "/x"}, file)["store"] == Setting("", "flag")


def test_variables_that_only_look_like_ours_are_left_alone():
    environment = {"STORE": "/a", "LLAMA_CKPT_": "/b", "LLAMA_CKPT_UNKNOWN": "/c", "llama_ckpt_store": "/d"}
    assert settings({}, environment, None)["store"] == Setting("", "default")


def test_a_file_that_is_not_there_counts_as_empty(tmp_path):
    assert settings({}, {}, tmp_path / "no" / "such.toml") == settings({}, {}, None)


def test_an_empty_file_is_a_file(file):
    file.write_text("# nothing set\n")
    assert settings({}, {}, file) == settings({}, {}, None)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('max_age = "7d"', "7d"),
        ("max_age = 90", "90"),
        ("max_age = 1.5", "1.5"),
        ("max_age = true", "true"),
        ("max_age = false", "false"),
        ('max_age = "größe"', "größe"),
    ],
)
def test_a_file_may_say_text_numbers_and_flags(file, line, value):
    file.write_text(line, encoding="utf-8")
    assert settings({}, {}, file)["max_age"].value == value


@pytest.mark.parametrize("content", [b"max_age =", b"= 1", b"[", b"max_age = 1\nmax_age = 2", b"\xff\xfe", b"a\0b"])
def test_a_file_that_is_no_toml_is_refused_by_its_name(file, content):
    file.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        settings({}, {}, file)
    assert (caught.value.values["what"], caught.value.values["value"]) == ("settings file", str(file))


def test_a_folder_in_place_of_the_file_is_refused_by_its_name(tmp_path):
    with pytest.raises(BadInput, match="settings file"):
        settings({}, {}, tmp_path)


def test_a_key_that_is_no_setting_is_refused_and_the_known_ones_named(file):
    file.write_text('max_agee = "7d"\n')
    with pytest.raises(BadInput, match=r"max_agee.*known are database_url, store, .*max_age"):
        settings({}, {}, file)


@pytest.mark.parametrize("value", ["[1, 2]", "{ a = 1 }", "2026-01-01", "12:00:00"])
def test_a_value_that_is_no_text_number_or_flag_is_refused(file, value):
    file.write_text(f"max_age = {value}\n")
    with pytest.raises(BadInput, match=r"setting max_age in .*expected text, a number or true/false"):
        settings({}, {}, file)


def test_a_bad_file_is_refused_even_where_a_flag_would_win(file):
    file.write_text("unknown = 1\n")
    with pytest.raises(BadInput):
        settings(dict.fromkeys(DEFAULTS, "x"), {}, file)


# -- durations and flags --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", 90),
        ("15m", 900),
        ("24h", 86400),
        ("7d", 604800),
        ("2w", 1209600),
        ("1.5h", 5400),
        ("0", 0),
        ("0.5s", 0.5),
        (" 2 h ", 7200),
        ("7 d", 604800),
    ],
)
def test_a_duration_is_read_in_seconds(text, expected):
    assert seconds(text, "max_age") == expected


@pytest.mark.parametrize(
    "text",
    ["", " ", "h", "-1", "-1h", "+1", "1e3", "1.", ".5", "1,5h", "1h30m", "5y", "5ms", "nan", "inf", "1h\nx", "0x10"],
)
def test_what_is_no_duration_is_refused_by_the_settings_name(text):
    with pytest.raises(BadInput) as caught:
        seconds(text, "max_age")
    assert (caught.value.values["what"], caught.value.values["value"]) == ("max_age", text)
    assert "90s, 15m, 24h, 7d or 2w" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((word, True) for word in ("1", "true", "yes", "on", "TRUE", " On ")),
        *((word, False) for word in ("0", "false", "no", "off", "False", "NO\n")),
    ],
)
def test_a_yes_or_no_is_read_in_its_usual_spellings(text, expected):
    assert flag(text, "drop_page_cache") is expected


@pytest.mark.parametrize("text", ["", "2", "y", "truee", "maybe", "none"])
def test_what_is_neither_yes_nor_no_is_refused(text):
    with pytest.raises(BadInput, match=r"drop_page_cache: .*expected true or false"):
        flag(text, "drop_page_cache")


@pytest.mark.parametrize("name", ["stale_grace", "ghost_grace"])
def test_the_defaults_are_values_their_own_readers_take(name):
    assert seconds(DEFAULTS[name], name) > 0
    assert flag(DEFAULTS["drop_page_cache"], "drop_page_cache") is False


# -- the policy: each setting is declared once, at its field ---------------------------------------------------------------

# A text of each kind, and its value.
TEXTS = {
    Kind.DURATION: ("36h", 129_600.0),
    Kind.SIZE: ("2KiB", 2048),
    Kind.COUNT: ("7", 7),
    Kind.SHARE: ("50%", 0.5),
    Kind.ORDER: ("LRU", Order.LRU),
}
FORMS = [(declared.name, kind, field) for declared in SETTINGS for kind, field in declared.forms]


def test_every_field_of_the_policy_is_a_setting():
    assert sorted(field for _, _, field in FORMS) == sorted(field.name for field in dataclasses.fields(Policy))
    assert [declared.name for declared in SETTINGS] == list(DEFAULTS)[-len(SETTINGS) :]
    assert all(re.fullmatch(r"[A-Z].*[\w%)]\.", declared.help) for declared in SETTINGS)


@pytest.mark.parametrize(("name", "kind", "field"), FORMS, ids=[f"{name}-{kind}" for name, kind, _ in FORMS])
def test_a_setting_of_the_policy_is_read_into_its_field_from_flag_environment_and_section(file, name, kind, field):
    text, value = TEXTS[kind]
    given = {"high_water": "100%", "low_water": "50%"} | {name: text}  # low water is never above high water
    file.write_text("[policy]\n" + "".join(f'{key} = "{words}"\n' for key, words in given.items()))
    variables = {f"LLAMA_CKPT_{key.upper()}": words for key, words in given.items()}
    for found in (settings(given, {}, None), settings({}, variables, None), settings({}, {}, file)):
        assert getattr(policy_of({key: setting.value for key, setting in found.items()}), field) == value


def test_the_defaults_of_the_settings_are_those_of_the_policy():
    assert policy_of(DEFAULTS) == policy_of({}) == Policy()
    assert (DEFAULTS["stale_grace"], DEFAULTS["high_water"], DEFAULTS["order"]) == ("24h", "100%", "value")
    assert (DEFAULTS["max_idle"], DEFAULTS["keep_last_per_label"]) == ("", "")


def test_help_ends_with_the_default_if_there_is_one():
    for declared in SETTINGS:
        assert declared.help.endswith(f"(default: {declared.default}).") is bool(declared.default)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("10%", Policy(min_free_share=0.1)),
        (" 2.5 % ", Policy(min_free_share=0.025)),
        ("20GB", Policy(min_free=20 * 10**9)),
    ],
)
def test_free_space_is_given_in_bytes_or_in_percent(text, policy):
    assert policy_of({"min_free": text}) == policy


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("max_idle", "soon", "--max-idle"),
        ("max_bytes", "10%", "--max-bytes"),
        ("max_count", "1.5", "--max-count"),
        ("high_water", "0.9", "expected a share such as 90%"),
        ("low_water", "101%", "--low-water"),
        ("order", "newest", "--order: .*expected one of value, lru, lfu, oldest"),
        ("min_free", "100%", "give less than 100 %"),
        ("half_life", "0s", "half_life"),
    ],
)
def test_a_policy_that_cannot_be_read_is_refused_by_the_name_of_its_option(name, text, words):
    with pytest.raises(BadInput, match=words):
        policy_of({name: text})


def test_a_section_policy_takes_only_settings_of_the_policy(file):
    file.write_text('[policy]\nstore = "/x"\n')
    with pytest.raises(BadInput, match=r"policy in .*store.*known are stale_grace, ghost_grace, max_age, .*half_life"):
        settings({}, {}, file)


def test_the_limits_that_are_set_are_named_once_each():
    policy = Policy(max_idle_s=1.0, max_bytes=5000, max_count_per_label=0, min_free=20, min_free_share=0.1)
    assert policy.limit_names() == ["max_idle", "max_bytes", "max_count_per_label", "min_free"]
    assert policy.limits_of_saves() == ["max_bytes (5000)", "min_free (20)", "min_free (10%)"]
    assert (Policy().limit_names(), Policy().limits_of_saves()) == ([], [])


def test_no_module_but_those_of_the_policy_lists_its_limits():
    limits = [declared.name for declared in SETTINGS if declared.is_limit]
    assert "max_bytes_per_label" in limits
    homes = {ROOT / "registry" / "llama_ckpt" / "retention" / f"{name}.py" for name in ("policy", "rules", "explain")}
    lists = {}
    for path in [*(ROOT / "registry").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        named = {name for name in limits if re.search(rf"\b{name}(_s)?\b", text)}
        if path not in homes and (len(named) > 2 or any("_per_" in name for name in named)):
            lists[path.name] = named
    assert lists == {}


# -- the password ---------------------------------------------------------------------------------------------------------

PASSWORD, PASSWORD_FILE = "LLAMA_CKPT_DATABASE_PASSWORD", "LLAMA_CKPT_DATABASE_PASSWORD_FILE"


def test_without_anything_there_is_no_password():
    assert database_password({}) is None


def test_a_password_in_the_environment_is_taken_as_it_is_and_no_file_is_read(tmp_path):
    assert database_password({PASSWORD: " s3cret\n"}) == " s3cret\n"
    assert database_password({PASSWORD: "s3cret", PASSWORD_FILE: str(tmp_path / "none")}) == "s3cret"
    assert database_password({PASSWORD: "", PASSWORD_FILE: str(tmp_path / "none")}) == ""


@pytest.mark.parametrize(
    ("content", "password"),
    [
        (b"s3cret", "s3cret"),
        (b"s3cret\n", "s3cret"),
        (b"s3cret\r\n", "s3cret"),
        (b"s3cret\nsecond line\n", "s3cret"),
        (b" with spaces \n", " with spaces "),
        ("größe@:/%\n".encode(), "größe@:/%"),
        (b"", ""),
        (b"\nsecond line", ""),
    ],
)
def test_a_password_in_a_file_is_its_first_line(tmp_path, content, password):
    (tmp_path / "password").write_bytes(content)
    assert database_password({PASSWORD_FILE: str(tmp_path / "password")}) == password


def test_a_password_file_that_cannot_be_read_is_refused_by_its_name_and_tells_nothing_of_its_content(tmp_path):
    (tmp_path / "binary").write_bytes(b"s3cret\xff")
    for path in (tmp_path / "none", tmp_path, tmp_path / "binary"):
        with pytest.raises(BadInput) as caught:
            database_password({PASSWORD_FILE: str(path)})
        assert (caught.value.values["what"], caught.value.values["value"]) == ("password file", str(path))
        assert "s3cret" not in str(caught.value)


def test_a_password_is_no_setting():
    assert not [name for name in DEFAULTS if "password" in name]
    assert "s3cret" not in str(settings({}, {PASSWORD: "s3cret"}, None))
