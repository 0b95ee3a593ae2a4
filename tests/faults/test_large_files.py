"""Verify and repair of a large file: how much memory they take beside the mapped pages, as the system counts it in a child.

LLAMA_CKPT_TEST_LARGE=1 makes the files 2 GB in place of 256 MiB.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import child

from llama_ckpt.fingerprint import fingerprint
from llama_ckpt.formats import container, engine_files

LIMIT = 64 << 20
SIZE = (2 << 30) if os.environ.get("LLAMA_CKPT_TEST_LARGE") == "1" else (256 << 20)
N_CELLS, N_LAYER = 1024, 2
CHILD = """
import json, re, resource, sys
from pathlib import Path
from llama_ckpt.integrity.repair import FileRepairer
from llama_ckpt.integrity.verify import all_ok, file_checks

def status(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

verb, path, limit = json.loads(sys.argv[1])
before = status("RssAnon")
# What is not mapped from a file may grow by the limit and no further, at any moment: beyond it there is a MemoryError.
resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + limit, resource.RLIM_INFINITY))
if verb == "verify":
    said = all_ok(file_checks(Path(path), None, deep=True))
else:
    said = FileRepairer(in_place=True, keep_backup=False).repair(Path(path)).faults != ()
mapped = Path(path).stat().st_size
print(json.dumps([said, status("VmHWM") - mapped - before, status("RssAnon") - before]))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def row_bytes() -> int:
    """Bytes of a row with which K and V of all layers take the file's size."""
    return SIZE // (2 * N_LAYER * N_CELLS)


def write_state(file, start: int) -> int:
    """A state of zeros from `start` on, of which only the words between the rows are written; gives where it ends."""
    cells = np.stack([np.arange(N_CELLS), np.ones(N_CELLS), np.zeros(N_CELLS)], axis=1).astype("<i4")
    file.seek(start)
    file.write(struct.pack("<II", 1, N_CELLS) + cells.tobytes() + struct.pack("<II", 0, N_LAYER))
    for _ in range(2 * N_LAYER):
        file.write(struct.pack("<iQ", 1, row_bytes()))
        file.seek(N_CELLS * row_bytes(), os.SEEK_CUR)
    file.truncate(file.tell())
    return file.tell()


def ggsq(path: Path, padding: int) -> None:
    with path.open("wb") as file:
        file.write(bytes(padding) + engine_files.MAGICS["ggsq"] + struct.pack("<II", 3, N_CELLS))
        file.write(np.arange(N_CELLS, dtype="<i4").tobytes())
        write_state(file, file.tell())


def llam(path: Path, padding: int) -> None:
    identity = fingerprint({"weights": "ab" * 32, "type_k": "f16", "type_v": "f16", "v_transposed": False})
    metadata = {"fingerprint": dict(identity.fields)}
    ids = np.arange(N_CELLS, dtype=np.int32)
    header = container.Header(
        flags=container.FLAG_SLICEABLE,
        seq_len=N_CELLS,
        start_token=0,
        n_layer=N_LAYER,
        n_kv_head=0,
        metadata_size=0,
        fingerprint=identity.digest,
        input_hash=bytes(32),
        created_ns=1,
    )
    body_at = padding + container.encode_head(header, metadata, ids, memoryview(b""))[1].payload_offset
    with path.open("w+b") as file:
        file.seek(body_at)
        file.write(struct.pack("<Ii", 0xAF143CD8, 0))
        write_state(file, file.tell())
        payload = np.memmap(file, mode="r", offset=body_at, dtype=np.uint8)
        head, _ = container.encode_head(header, metadata, ids, memoryview(payload))
        file.seek(padding)
        file.write(head)


@pytest.mark.parametrize("make", [llam, ggsq], ids=["LLAM", "ggsq"])
@pytest.mark.parametrize("verb", ["verify", "repair"])
def test_a_large_file_takes_little_memory_beside_its_mapped_pages(tmp_path, make, verb, record_property):
    path = tmp_path / "large"
    make(path, padding=0 if verb == "verify" else 3)
    line = [sys.executable, "-c", CHILD, json.dumps([verb, str(path), LIMIT])]
    ran = subprocess.run(line, env=child.environment(), capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    said, peak_beside_pages, left = json.loads(ran.stdout)
    record_property("peak_beside_pages", peak_beside_pages)
    assert said is True
    assert peak_beside_pages < LIMIT
    assert left < LIMIT
    path.unlink()
