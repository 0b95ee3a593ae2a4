"""`Registry.configured`: the registry that environment and settings file name, as the command opens it."""

from __future__ import annotations

import pytest

from llama_ckpt.errors import BadInput
from llama_ckpt.registry import DATABASE_FILE, Registry


@pytest.fixture
def settings_file(tmp_path, monkeypatch):
    """Writes the settings file."""
    path = tmp_path / "settings.toml"

    def write(text):
        path.write_text(text, encoding="utf-8")
        monkeypatch.setenv("LLAMA_CKPT_CONFIG", str(path))

    return write


def test_the_settings_file_names_store_and_limits(tmp_path, settings_file):
    store = tmp_path / "mein Speicher 日本語"
    settings_file(f'store = "{store.as_posix()}"\nmin_match_tokens = 5\n[policy]\nmax_bytes = "1GB"\n')
    with Registry.configured() as registry:
        assert registry.store.root == store
        assert (registry.context.min_match_tokens, registry.context.policy.max_bytes) == (5, 10**9)
    assert (store / DATABASE_FILE).is_file()


def test_the_environment_goes_before_the_file(tmp_path, settings_file, monkeypatch, database_url):
    settings_file(f'store = "{(tmp_path / "other").as_posix()}"\ndelta_depth = 3')
    monkeypatch.setenv("LLAMA_CKPT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("LLAMA_CKPT_DATABASE_URL", database_url)
    with Registry.configured() as registry, Registry.open(database_url, tmp_path / "store") as same:
        assert registry.registry_id == same.registry_id
        assert (registry.store.root, registry.context.delta_depth) == (tmp_path / "store", 3)


def test_without_any_setting_it_is_the_folder_of_the_user(tmp_path):
    with Registry.configured() as registry, Registry.open() as same:
        assert registry.store.root == same.store.root
        assert registry.store.root.is_relative_to(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [("min_match_tokens = 1", "2 or more"), ("delta_depth = 'many'", "'many'"), ("stoer = '/x'", "stoer")],
)
def test_a_setting_that_cannot_be_used_is_named(settings_file, text, words):
    settings_file(text)
    with pytest.raises(BadInput, match=words):
        Registry.configured()
