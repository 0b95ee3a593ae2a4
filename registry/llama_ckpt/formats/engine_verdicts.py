"""What engines would say of a file: llama.cpp's own loaders, version by version, and llama-ckpt in front of them. Pure.

Learnt from `llama_context::state_seq_load_file` and `state_load_file` (llama.cpp b11434, src/llama-context.cpp): they compare
magic and version with their own, and of a body that ends too early they only notice, after they read past its end, that an
assertion does not hold; that ends the process.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import zip_longest

from llama_ckpt.formats.engine_files import GGSN, GGSQ, MAGICS, VERSIONS
from llama_ckpt.formats.identification import Identified
from llama_ckpt.formats.kv.layout import Dialect
from llama_ckpt.formats.kv.types import ALL_TYPES, FLOAT_EXPONENTS

# Which builds are known to write a version of ggsq. One that is not named here is called by its numbers alone.
_BUILDS = {2: "llama-cpp-python 0.3.26", 3: "llama-cpp-python 0.3.36, llama.cpp b11401", 4: "llama.cpp b11434"}
_BEFORE_STREAMS = "llama.cpp until July 2025"
_FLOAT_TYPES = {ALL_TYPES[number].name for number in FLOAT_EXPONENTS}
_SHORT = (
    "aborts the process or loads wrong numbers: it checks nothing, reads past the end of a short file, and then "
    "GGML_ASSERT(nread <= state_size) fails"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVerdict:
    """What becomes of a file in one group of llama.cpp builds: given to it as it is (`loads`, and `says` how it puts it), and
    through llama-ckpt.
    """

    engine: str
    loads: bool
    says: str
    through_llama_ckpt: str

    def __str__(self) -> str:
        return f"{self.says}; through llama-ckpt: {self.through_llama_ckpt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """A group of builds: the versions of ggsq and ggsn that they write, and whether their caches have streams."""

    builds: str
    ggsq: int
    ggsn: int
    streams: bool = True

    @property
    def name(self) -> str:
        numbers = f"ggsq {self.ggsq}, ggsn {self.ggsn}"
        return f"{self.builds} ({numbers})" if self.builds else f"llama.cpp with {numbers}"


def _engines() -> tuple[_Engine, ...]:
    """Every group that the reader knows, the oldest first: both formats go up together, one version of each a group."""
    of_ggsq, of_ggsn = sorted(VERSIONS[GGSQ]), sorted(VERSIONS[GGSN])
    pairs = [(q or of_ggsq[-1], n or of_ggsn[-1]) for q, n in zip_longest(of_ggsq, of_ggsn, fillvalue=0)]
    oldest = _Engine(builds=_BEFORE_STREAMS, ggsq=pairs[0][0], ggsn=pairs[0][1], streams=False)
    return (oldest, *(_Engine(builds=_BUILDS.get(ggsq, ""), ggsq=ggsq, ggsn=ggsn) for ggsq, ggsn in pairs))


def engine_verdicts(view: memoryview, found: Identified) -> tuple[EngineVerdict, ...]:
    """One answer for each group of llama.cpp builds known here, the oldest first; `found` is what `identify` told of `view`."""
    answers = []
    for engine in _engines():
        why_not = _refusal(view, found, engine)
        answers.append(
            EngineVerdict(
                engine=engine.name,
                loads=why_not is None,
                says=why_not or _needs(found),
                through_llama_ckpt=_through_llama_ckpt(found, engine),
            )
        )
    return tuple(answers)


def _refusal(view: memoryview, found: Identified, engine: _Engine) -> str | None:
    """Why an engine does not load the file, in the words of its log where it has some."""
    if len(view) < 8:
        return "refuses: the file ends before its version"
    kind = GGSN if found.format == GGSN else GGSQ
    magic, version = struct.unpack_from("<II", view)
    own = engine.ggsn if kind == GGSN else engine.ggsq
    if bytes(view[:4]) != MAGICS[kind] or version != own:
        what = "session file" if kind == GGSN else "sequence state file"
        return f"refuses: unknown (magic, version) for {what}: {magic:08x}, {version:08x}"
    if not found.whole:
        return _SHORT
    if _streams(found) not in (None, engine.streams):
        there = "no streams" if engine.streams else "streams"
        return f"refuses, or reads it wrong: the version is its own, but the body has {there}"
    return None


def _streams(found: Identified) -> bool | None:
    """Whether the attention caches have streams; None where there is no such cache."""
    if found.dialect is None or found.type_k == "none":
        return None
    return Dialect.from_text(found.dialect).n_stream > 0


def _needs(found: Identified) -> str:
    needs = ["the same model", f"K {found.type_k}, V {found.type_v}"]
    if found.type_k != "none":
        needs.append("no flash attention" if found.v_transposed else "flash attention")
    n_stream = Dialect.from_text(found.dialect).n_stream if found.dialect else 0
    if n_stream:
        needs.append("one stream" if n_stream == 1 else f"{n_stream} streams")
    packed = "; llama-server only: its token list is packed" if found.packed else ""
    return f"loads, where it has {', '.join(needs)}{packed}"


def _through_llama_ckpt(found: Identified, engine: _Engine) -> str:
    """Whether, and how, llama-ckpt gives the state to such an engine."""
    if not found.whole and found.format != "unknown":
        return "not restored: it is not whole"
    if not found.restorable or found.dialect is None:
        return f"not restored: {found.why_not}"
    dialect, words = Dialect.from_text(found.dialect), VERSIONS[GGSQ][engine.ggsq]
    if not engine.streams:
        return "not restored: states of before streams are read, not written"
    if _streams(found) is None:
        return "restores"
    if dialect.cell_extension and (dialect.cell_extension == 8) != (engine.ggsq == min(VERSIONS[GGSQ])):
        return f"not restored: each cell has {dialect.cell_extension} bytes more, which that engine has not"
    if dialect.n_stream and dialect.rotation_words == words:
        return "restores"
    if not found.sliceable:
        return f"not restored: a state of {found.memory} memory is not translated"
    if dialect.rotation_words == words or {found.type_k, found.type_v} <= {*_FLOAT_TYPES, "none"}:
        return "translated, then restores"
    return (
        "translated, then restores if both rotate K and V alike: a quantised state does not say without rotation words"
    )
