"""A vocabulary without weights gives the token ids of the engine that has them."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from support import tiny_models

from llama_ckpt.errors import BadInput
from llama_ckpt.values import Outcome

pytestmark = pytest.mark.llama

TEXTS = [
    "Hello",
    "  two spaces, a\ttab\nand a line\r\n",
    "Grüße, 日本語, 🙂",
    "<|im_start|>user\nHi<|im_end|>\n",
    "no\0 end",
]


@pytest.fixture(scope="session")
def vocabulary(gguf):
    from llama_ckpt.engine.vocabulary import LlamaCppVocabulary

    return LlamaCppVocabulary(gguf)


@pytest.mark.parametrize("text", TEXTS, ids=["word", "blanks", "beyond ascii", "special tokens", "nul"])
def test_a_vocabulary_gives_the_engines_token_ids_and_the_text_back(vocabulary, engine, text):
    ids = vocabulary.token_ids(text)
    assert np.array_equal(ids, engine.token_ids(text))
    assert ids.dtype == np.int32
    assert vocabulary.text_of(ids) == engine.text_of(ids) == text


def test_a_piece_of_a_character_and_an_id_of_no_token_are_shown_as_such(vocabulary):
    ids = vocabulary.token_ids("🙂")
    assert vocabulary.text_of(ids[:1]) == "\ufffd"
    assert vocabulary.text_of(np.array([2**31 - 1, int(ids[0])], dtype=np.int32)).startswith("\ufffd")
    assert vocabulary.text_of(ids[:0]) == ""


def test_a_token_longer_than_most_is_given_whole(vocabulary):
    ids = vocabulary.token_ids(" " * 200 + "=" * 200 + "-" * 200)
    assert vocabulary.text_of(ids) == " " * 200 + "=" * 200 + "-" * 200
    assert max(len(vocabulary.text_of(ids[i : i + 1])) for i in range(len(ids))) >= 32


def test_a_file_that_is_no_model_is_refused(tmp_path):
    from llama_ckpt.engine.vocabulary import LlamaCppVocabulary

    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF, and no more")
    with pytest.raises(BadInput, match=r"llama\.cpp cannot load it"):
        LlamaCppVocabulary(path)


def test_a_text_that_gives_no_token_is_refused(vocabulary):
    with pytest.raises(BadInput, match="gives no token"):
        vocabulary.token_ids("")


def test_a_text_is_found_by_prefix_with_the_vocabulary_alone(registry, engine, vocabulary, gguf):
    shared = "The quick brown fox jumps over the lazy dog. " * 3
    ids = engine.token_ids(shared + "And then it rains.")
    engine.evaluate(ids)
    saved = registry.save(engine, shared + "And then it rains.").checkpoint
    weights = hashlib.sha256(gguf.read_bytes()).digest()
    asked = shared + "And then it snows."
    found = registry.match(asked, vocabulary=vocabulary, weights=weights)
    n_common = next(i for i, (a, b) in enumerate(zip(ids, vocabulary.token_ids(asked), strict=False)) if a != b)
    assert (found.outcome, found.checkpoint.id, found.n_matching) == (Outcome.HIT, saved.id, n_common)
    assert found.divergence.at == n_common
    assert (found.divergence.in_input, found.divergence.in_checkpoint) == (" snows.", " rains.")
    assert found.divergence.before.endswith(" And then it")


def test_the_vocabulary_of_a_model_that_has_none_is_refused(tmp_path):
    from llama_ckpt.engine.vocabulary import LlamaCppVocabulary

    with pytest.raises(BadInput, match="no vocabulary"):
        LlamaCppVocabulary(tiny_models.write(tmp_path / "tiny.gguf", "full"))
