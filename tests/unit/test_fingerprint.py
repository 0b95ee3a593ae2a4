"""What inputs and models are called. Literal digests were made with sha256sum, not with this code."""

from __future__ import annotations

import array
import dataclasses
import hashlib
import json
import shutil
import subprocess

import numpy as np
import pytest

from llama_ckpt.errors import BadInput
from llama_ckpt.fingerprint import (
    active_key,
    as_token_ids,
    canonical_json,
    differences,
    end_hashes,
    fingerprint,
    flight_key,
    hash_input,
    links_of,
    prefix_hashes,
    tokens_hash,
    tokens_hashes,
    weights_digest,
)
from llama_ckpt.values import Checkpoint

# -- inputs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "digest"),
    [
        ("hello", "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"),
        ("hello\n", "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"),
        ("hello\r\n", "cd2eca3535741f27a8ae40c31b0c41d4057a7a7b912b33b9aed86485d1c84676"),
        ("größe 中\n", "5cc39577dba5c3ffa5cd8524cc8f3088a4fcc16dc93ec1bdbc49ebac53a6ab25"),
        ("[1]", "080a9ed428559ef602668b4c00f114f1a11c3f6b02a435f0bdc154578e4d7f22"),
    ],
)
def test_a_text_is_named_by_the_sha256_of_its_exact_bytes(text, digest):
    assert hash_input(text).hex() == digest


@pytest.mark.parametrize("text", ["a", "a\n", "\n", " a", "\t\0\x7f", "😀", "\ufeffa", "a" * 100_000])
def test_a_texts_name_is_what_hashlib_says_of_its_utf8(text):
    assert hash_input(text) == hashlib.sha256(text.encode("utf-8")).digest()


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum on this system")
def test_a_texts_name_is_what_sha256sum_says_of_a_file_with_it(tmp_path):
    text = "Grüße,\r\n\nline\n"
    (tmp_path / "prompt.txt").write_bytes(text.encode())
    said = subprocess.run(["sha256sum", tmp_path / "prompt.txt"], capture_output=True, text=True, check=True).stdout
    assert hash_input(text).hex() == said.split()[0]


def test_texts_that_look_alike_are_different_inputs():
    alike = ["a", "a ", " a", "a\n", "a\r\n", "A", "\u00e4", "a\u0308", "ä".upper(), "\ufeffa"]
    assert len({hash_input(text) for text in alike}) == len(alike)


@pytest.mark.parametrize(
    ("ids", "digest"),
    [
        ([1, 2, 256], "4cce4ffd3b07ffb2139196f2e9112a30f970eae20aa98e082c020c9118bc3a4c"),
        ([2**31 - 1], "a2c70538651a7e9296b097e8c3dfc1b195a945802ffe45aa471868fba6f1042e"),
    ],
)
def test_token_ids_are_named_by_the_sha256_of_little_endian_int32(ids, digest):
    assert hash_input(ids).hex() == digest
    assert tokens_hash(np.array(ids, dtype=np.int32)).hex() == digest


@pytest.mark.parametrize(
    "given",
    [
        (1, 2, 256),
        range(1, 4),
        array.array("i", [1, 2, 256]),
        np.array([1, 2, 256], dtype=np.int64),
        np.array([1, 2, 256], dtype=np.uint16),
        np.array([1, 2, 256], dtype=">i4"),
        np.array([1, 0, 2, 0, 256, 0], dtype=np.int32)[::2],
    ],
    ids=lambda g: type(g).__name__ + str(getattr(g, "dtype", "")),
)
def test_the_same_ids_have_the_same_name_in_whatever_they_come(given):
    ids = as_token_ids(given)
    assert (ids.dtype, ids.ndim, ids.flags.c_contiguous) == (np.dtype(np.int32), 1, True)
    assert hash_input(given) == hash_input([int(i) for i in given])


def test_the_order_and_number_of_ids_count():
    assert len({hash_input(ids) for ids in ([1, 2], [2, 1], [1], [1, 2, 0], [0, 1, 2], [513])}) == 6


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("", "it is empty"),
        ("\ud800", "lone surrogate"),
        ("text with \udcff inside", "lone surrogate"),
        ([], "at least one id"),
        (np.empty(0, dtype=np.int32), "at least one id"),
        ([[1, 2], [3, 4]], "need a flat sequence"),
        ([[1, 2], [3]], "inhomogeneous"),
        (7, "need a flat sequence"),
        (None, "need a flat sequence"),
        ({1, 2}, "need a flat sequence"),
        ((i for i in (1, 2)), "need a flat sequence"),
        ([-1], "outside 0 .. 2147483647"),
        ([0, 2**31], "outside 0 .. 2147483647"),
        ([2**63], "outside 0 .. 2147483647"),
        ([2**64], "ids are whole numbers"),
        ([1.0, 2.0], "ids are whole numbers"),
        ([float("nan")], "ids are whole numbers"),
        ([True, False], "ids are whole numbers"),
        (["1", "2"], "ids are whole numbers"),
        ([None], "ids are whole numbers"),
        (b"bytes", "decode bytes first"),
        (bytearray(b"bytes"), "decode bytes first"),
        (memoryview(b"bytes"), "decode bytes first"),
    ],
    ids=lambda value: repr(value).split(" at 0x")[0],
)
def test_what_is_no_input_is_refused_with_the_reason(given, reason):
    with pytest.raises(BadInput, match=reason):
        hash_input(given)


@pytest.mark.parametrize(
    "given",
    [
        "secret words \ud800",
        b"secret words",
        bytearray(b"secret words"),
        ["secret words"],
        [["secret words"], []],
        [31337, -1],
        [31337, 2**31],
        [31337.0],
        [[31337], [31337, 31337]],
        np.array([[31337]]),
        {"secret words": 31337},
    ],
    ids=lambda value: repr(value).split(" at 0x")[0],
)
def test_a_refusal_tells_nothing_of_the_input_for_it_may_be_confidential(given):
    with pytest.raises(BadInput) as caught:
        hash_input(given)
    assert "secret" not in str(caught.value)
    assert "31337" not in str(caught.value)


# -- fingerprints ---------------------------------------------------------------------------------------------------------

FIELDS = {"weights": "ab" * 32, "type_k": "f16", "type_v": "f16", "v_transposed": True}


def test_the_fingerprint_of_given_fields_never_changes():
    """An accidental change would orphan every checkpoint that is saved."""
    assert fingerprint(FIELDS).digest.hex() == "a2d301e7d733249a9e6dd9d77f85cfcd54c44560b657bd2e782195e216aaf0ce"
    rich = {
        "weights": "cd" * 32,
        "v_transposed": False,
        "rope_freq_base": 10000.0,
        "lora": ["aa*1.0"],
        "kv_overrides": {"größe": "1"},
    }
    assert fingerprint(rich).digest.hex() == "30854182586f208d07ed5a0cfe1c56b09ea93771fa7418f66a9c4cf7dcd86da9"


def test_the_fingerprint_is_the_sha256_of_the_canonical_json_with_the_schema():
    found = fingerprint(FIELDS)
    assert found.fields == {"schema": 1, **FIELDS}
    assert found.digest == hashlib.sha256(canonical_json(found.fields)).digest()
    assert canonical_json({"b": [1, True], "a": "ü"}) == '{"a":"ü","b":[1,true]}'.encode()
    assert found.weights_sha256 == bytes.fromhex("ab" * 32)


def test_the_order_of_the_fields_does_not_count():
    nested = {**FIELDS, "kv_overrides": {"a": "1", "b": "2"}}
    other_way = {k: nested[k] for k in reversed(nested)} | {"kv_overrides": {"b": "2", "a": "1"}}
    assert list(other_way) != list(nested)
    assert fingerprint(other_way).digest == fingerprint(nested).digest


def test_a_fingerprint_read_back_from_its_own_fields_is_the_same():
    found = fingerprint({**FIELDS, "rope_freq_base": 1e-05, "lora": ["aa*0.5"]})
    again = fingerprint(json.loads(json.dumps(dict(found.fields))))
    assert again == found


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "cd" * 32},
        {"type_k": "q8_0"},
        {"type_v": "q8_0"},
        {"v_transposed": False},
        {"lora": ["aa*1.0"]},
        {"rope_freq_base": 10000.0},
        {"kv_overrides": {}},
        {"schema": 2},
    ],
)
def test_each_field_that_is_set_makes_another_fingerprint(change):
    assert fingerprint({**FIELDS, **change}).digest != fingerprint(FIELDS).digest


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "the field 'weights' is not there"),
        ({"type_k": "f16"}, "the field 'weights' is not there"),
        ({**FIELDS, "rope": float("nan")}, "not JSON compliant"),
        ({**FIELDS, "rope": float("inf")}, "not JSON compliant"),
        ({**FIELDS, "weights": b"\xab" * 32}, "bytes is not JSON serializable"),
        ({**FIELDS, "lora": ["\ud800"]}, "surrogates not allowed"),
    ],
)
def test_fields_that_make_no_fingerprint_are_refused(fields, reason):
    with pytest.raises(BadInput, match=reason):
        fingerprint(fields)


# -- what keeps two apart -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "now", "words"),
    [
        ({}, {}, []),
        ({"weights": "ab" * 32}, {"weights": "ab" * 32}, []),
        (
            {"weights": "ab" * 32},
            {"weights": "cd" * 32},
            ["weights: saved abababababab…, now cdcdcdcdcdcd…"],
        ),
        ({"type_k": "f16"}, {"type_k": "q8_0"}, ["K type: saved f16, now q8_0"]),
        ({"type_v": "f16"}, {"type_v": "q8_0"}, ["V type: saved f16, now q8_0"]),
        ({"v_transposed": True}, {"v_transposed": False}, ["flash attention (V transposed): saved yes, now no"]),
        ({}, {"lora": ["aa*1.0"]}, ["lora: saved not set, now ['aa*1.0']"]),
        ({"rope_freq_base": 1e6}, {}, ["rope_freq_base: saved 1000000.0, now not set"]),
        ({"schema": 1}, {"schema": 2}, ["schema: saved 1, now 2"]),
    ],
)
def test_a_difference_is_told_in_words(saved, now, words):
    assert [str(d) for d in differences(saved, now)] == words


def test_differences_come_in_the_order_a_person_asks_for_them_and_each_once():
    saved = {"weights": "a", "type_k": "f16", "type_v": "f16", "v_transposed": True, "alpha": 1}
    now = {"weights": "b", "type_k": "f32", "type_v": "f32", "v_transposed": False, "zeta": 1}
    fields = [d.field for d in differences(saved, now)]
    assert fields == ["weights", "K type", "V type", "flash attention (V transposed)", "alpha", "zeta"]


# -- weights and keys -----------------------------------------------------------------------------------------------------


def test_a_model_in_one_file_is_named_by_that_file():
    assert weights_digest([b"\x01" * 32]) == b"\x01" * 32


def test_a_model_in_shards_is_named_by_all_of_them_in_order():
    a, b = hashlib.sha256(b"a").digest(), hashlib.sha256(b"b").digest()
    assert weights_digest([a, b]) == hashlib.sha256(a + b).digest()
    assert len({weights_digest(shards) for shards in ([a], [b], [a, b], [b, a], [a, a], [a, b, b])}) == 6


def test_the_active_key_is_of_fingerprint_and_input_and_tells_them_apart():
    one, two = bytes(32), b"\x01" * 32
    assert active_key(one, two).hex() == hashlib.sha256(one + two).hexdigest()
    assert len({active_key(a, b) for a in (one, two) for b in (one, two)}) == 4


# -- prefix hashes ------------------------------------------------------------------------------------------------------

SEED = b"\x11" * 32
FIRST_BLOCK, END_AFTER_IT = (
    bytes.fromhex("8b4fe897be8dd15edec4cb7ada69421a"),
    bytes.fromhex("4019f6dc456e97130d1fab7d649638cf"),
)


def ids(*values):
    return np.array(values, dtype=np.int32)


def links(n_tokens, block_size, start_token=0):
    """The links of a checkpoint of the token ids 1, 2, 3, …, as (n_tokens, prefix_hash)."""
    fields = {field.name: None for field in dataclasses.fields(Checkpoint)}
    named = {"fingerprint": SEED, "n_tokens": n_tokens, "start_token": start_token, "ckpt_no": 7}
    made = links_of(Checkpoint(**{**fields, **named}), np.arange(1, n_tokens + 1, dtype=np.int32), block_size)
    assert all((link.file_tokens, link.ckpt_no) == (n_tokens, 7) for link in made)
    return {link.n_tokens: link.prefix_hash for link in made}


def test_a_prefix_hash_is_that_of_the_hash_before_it_and_the_ids_of_its_block():
    assert prefix_hashes(SEED, ids(1, 2, 3), 2) == [FIRST_BLOCK]
    assert end_hashes(FIRST_BLOCK, ids(3)) == [END_AFTER_IT]
    assert prefix_hashes(SEED, ids(1), 2) == []
    assert end_hashes(SEED, ids(1, 2)) == [end_hashes(SEED, ids(1))[0], FIRST_BLOCK]
    assert end_hashes(SEED, ids()) == []


def test_a_prefix_hash_depends_on_every_id_before_it_and_on_the_model():
    chain = prefix_hashes(SEED, ids(1, 2, 3, 4, 5, 6), 2)
    assert len(set(chain)) == 3
    assert prefix_hashes(SEED, ids(1, 2, 3, 9, 5, 6), 2)[0] == chain[0]
    assert not set(prefix_hashes(SEED, ids(1, 9, 3, 4, 5, 6), 2)) & set(chain)
    assert not set(prefix_hashes(b"\x12" * 32, ids(1, 2, 3, 4, 5, 6), 2)) & set(chain)


def test_beginnings_hashed_in_one_pass_have_the_hashes_that_each_has_alone():
    ids = np.arange(40, dtype=np.int32)
    assert tokens_hashes(ids, [7, 40, 1, 7]) == {n: tokens_hash(ids[:n]) for n in (1, 7, 40)}
    assert tokens_hashes(ids, []) == {}


def test_a_checkpoint_links_its_full_blocks_and_its_end():
    assert list(links(9, 4)) == [4, 8, 9]
    assert list(links(8, 4)) == [4, 8]
    assert list(links(3, 4)) == [3]
    assert links(3, 2) == {2: FIRST_BLOCK, 3: END_AFTER_IT}
    assert links(9, 4)[8] == links(8, 4)[8], "an end at a block's edge is that block"


def test_a_delta_links_from_the_edge_of_the_block_in_which_it_starts_and_leaves_the_rest_to_its_parent():
    whole = links(11, 4)
    assert links(11, 4, start_token=4) == {n: whole[n] for n in (4, 8, 11)}
    assert links(11, 4, start_token=7) == {n: whole[n] for n in (4, 8, 11)}
    assert links(11, 4, start_token=9) == {n: whole[n] for n in (8, 11)}


# -- single flight --------------------------------------------------------------------------------------------------------


def key(ids, n_known, digest=b"\1" * 32):
    return flight_key(digest, as_token_ids(ids), n_known, 4)


def test_inputs_that_go_on_with_the_same_block_have_one_flight_key_and_others_have_another():
    one, other = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 10, 11]
    assert key(one, 0) == key(other, 3) == key(one[:4], 0)
    assert key(one, 4) == key(other, 7) != key(one, 0)
    assert key(one, 8) != key(other, 8)
    assert key([0, *one[1:]], 4) != key(one, 4), "the same block behind another one"
    assert key(one, 0) != key(one, 0, digest=b"\2" * 32), "of another model"


def test_an_input_that_ends_inside_a_block_has_the_flight_key_of_its_end():
    ids = [1, 2, 3, 4, 5, 6]
    assert key(ids, 4) == key(ids, 5) != key([*ids, 7], 4)
    assert key([1, 2], 0) == key([1, 2], 1) != key([1, 3], 0)


def test_a_flight_key_is_the_sha256_of_the_blocks_prefix_hash():
    ids = as_token_ids([1, 2, 3, 4, 5, 6, 7, 8])
    second = prefix_hashes(b"\1" * 32, ids, 4)[1]
    assert key(ids, 4) == hashlib.sha256(second).digest()
