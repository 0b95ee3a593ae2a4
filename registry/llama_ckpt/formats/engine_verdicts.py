"""Which llama.cpp builds load a file: with their own loaders, version by version, and through llama-ckpt. Pure.

Source: `llama_context::state_seq_load_file` and `state_load_file` (llama.cpp b11434, src/llama-context.cpp). They compare
magic and version with their own. If a body is too short, they read past its end first, and then an assertion fails, which
aborts the process.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import zip_longest

from llama_ckpt.formats.engine_files import MAGICS, VERSIONS
from llama_ckpt.formats.identification import Identified
from llama_ckpt.formats.kv.layout import Dialect
from llama_ckpt.formats.kv.types import ALL_TYPES, FLOAT_EXPONENTS
from llama_ckpt.formats.magic import FileFormat

# Builds that are known to write a version of ggsq. A version without an entry is shown by its numbers alone.
_BUILDS = {2: "llama-cpp-python 0.3.26", 3: "llama-cpp-python 0.3.36, llama.cpp b11401", 4: "llama.cpp b11434"}
_BEFORE_STREAMS = "llama.cpp until July 2025"
_FLOAT_TYPES = {ALL_TYPES[number].name for number in FLOAT_EXPONENTS}
_READS_PAST_END = (
    "aborts the process or loads wrong numbers: it checks nothing, reads past the end of a short file, and then "
    "GGML_ASSERT(nread <= state_size) fails"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVerdict:
    """Whether one group of llama.cpp builds loads a file as it is (`loads`; `says` is what it needs, or its refusal), and
    what happens through llama-ckpt.
    """

    engine: str
    loads: bool
    says: str
    through_llama_ckpt: str

    def __str__(self) -> str:
        return f"{self.says}; through llama-ckpt: {self.through_llama_ckpt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """A group of builds with the versions of ggsq and ggsn that they write. `streams`: whether their caches have streams."""

    builds: str
    ggsq: int
    ggsn: int
    streams: bool = True

    @property
    def name(self) -> str:
        numbers = f"ggsq {self.ggsq}, ggsn {self.ggsn}"
        return f"{self.builds} ({numbers})" if self.builds else f"llama.cpp with {numbers}"


def _engines() -> tuple[_Engine, ...]:
    """Every known group, the oldest first. The versions of both formats increase together: one of each per group."""
    of_ggsq, of_ggsn = sorted(VERSIONS[FileFormat.GGSQ]), sorted(VERSIONS[FileFormat.GGSN])
    pairs = [(q or of_ggsq[-1], n or of_ggsn[-1]) for q, n in zip_longest(of_ggsq, of_ggsn, fillvalue=0)]
    oldest = _Engine(builds=_BEFORE_STREAMS, ggsq=pairs[0][0], ggsn=pairs[0][1], streams=False)
    return (oldest, *(_Engine(builds=_BUILDS.get(ggsq, ""), ggsq=ggsq, ggsn=ggsn) for ggsq, ggsn in pairs))


def engine_verdicts(view: memoryview, identified: Identified) -> tuple[EngineVerdict, ...]:
    """One verdict for each known group of llama.cpp builds, the oldest first. `identified` is the result of `identify(view)`."""
    verdicts = []
    for engine in _engines():
        why_not = _refusal(view, identified, engine)
        verdicts.append(
            EngineVerdict(
                engine=engine.name,
                loads=why_not is None,
                says=why_not or _needs(identified),
                through_llama_ckpt=_through_llama_ckpt(identified, engine),
            )
        )
    return tuple(verdicts)


def _refusal(view: memoryview, identified: Identified, engine: _Engine) -> str | None:
    """Why an engine does not load the file, in the words of its log if it logs any; None if it does."""
    if len(view) < 8:
        return "refuses: the file ends before its version"
    kind = FileFormat.GGSN if identified.format is FileFormat.GGSN else FileFormat.GGSQ
    magic, version = struct.unpack_from("<II", view)
    own = engine.ggsn if kind is FileFormat.GGSN else engine.ggsq
    if bytes(view[:4]) != MAGICS[kind] or version != own:
        what = "session file" if kind is FileFormat.GGSN else "sequence state file"
        return f"refuses: unknown (magic, version) for {what}: {magic:08x}, {version:08x}"
    if not identified.whole:
        return _READS_PAST_END
    if _streams(identified) not in (None, engine.streams):
        there = "no streams" if engine.streams else "streams"
        return f"refuses, or reads it wrong: the version is its own, but the body has {there}"
    return None


def _streams(identified: Identified) -> bool | None:
    """Whether the attention caches have streams; None if there is no attention cache."""
    if identified.dialect is None or identified.type_k == "none":
        return None
    return Dialect.from_text(identified.dialect).n_stream > 0


def _needs(identified: Identified) -> str:
    needs = ["the same model", f"K {identified.type_k}, V {identified.type_v}"]
    if identified.type_k != "none":
        needs.append("no flash attention" if identified.v_transposed else "flash attention")
    n_stream = Dialect.from_text(identified.dialect).n_stream if identified.dialect else 0
    if n_stream:
        needs.append("one stream" if n_stream == 1 else f"{n_stream} streams")
    packed = "; llama-server only: its token list is packed" if identified.packed else ""
    return f"loads, where it has {', '.join(needs)}{packed}"


def _through_llama_ckpt(identified: Identified, engine: _Engine) -> str:
    """Whether and how llama-ckpt loads the state into such an engine."""
    if not identified.whole and identified.format is not FileFormat.UNKNOWN:
        return "not restored: it is not whole"
    if not identified.restorable or identified.dialect is None:
        return f"not restored: {identified.why_not}"
    dialect, words = Dialect.from_text(identified.dialect), VERSIONS[FileFormat.GGSQ][engine.ggsq]
    if not engine.streams:
        return "not restored: states of before streams are read, not written"
    if _streams(identified) is None:
        return "restores"
    if dialect.cell_extension and (dialect.cell_extension == 8) != (engine.ggsq == min(VERSIONS[FileFormat.GGSQ])):
        return f"not restored: each cell has {dialect.cell_extension} bytes more, which that engine has not"
    if dialect.n_stream and dialect.rotation_words == words:
        return "restores"
    if not identified.sliceable:
        return f"not restored: a state of {identified.memory} memory is not translated"
    if dialect.rotation_words == words or {identified.type_k, identified.type_v} <= {*_FLOAT_TYPES, "none"}:
        return "translated, then restores"
    return (
        "translated, then restores if both rotate K and V alike: a quantised state does not say without rotation words"
    )
