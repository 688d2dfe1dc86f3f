"""Whatever the registry names is tested and described: a family is not there before it is.

A case of `support.family_cases` is compared with transformers (test_families), drawn (test_drawn_families), run by
recorded steps (test_family_engines) and on two ranks (test_tensor_parallel), without a word there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.family_cases import FIRST_CASES
from support.gguf_encoders import ARCHITECTURES as ENCODER_FILES
from support.gguf_families import LAYOUTS
from support.tiny_models import FAMILIES
from support.vision import CASES

from octavo.gguf.encoders import ENCODERS as GGUF_ENCODERS
from octavo.gguf.families import ARCHITECTURES
from octavo.interface.architectures import ENCODERS, IMAGE_READERS, MODELS
from octavo.models.registry import model_class

ROOT = Path(__file__).parents[3]
# What transformers has no case for -> the tests that compare, record and split it.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "InternLM2ForCausalLM": ("test_renamed_families", "test_family_engines", "test_tensor_parallel"),
    "InternLM3ForCausalLM": ("test_renamed_families", "test_family_engines", "test_tensor_parallel"),
}
# Compared with transformers and recorded in tests/server/engine: test_encoders, test_rerankers; split in
# test_tensor_parallel.
ELSEWHERE |= {name: () for name, module in MODELS.items() if name in ENCODERS or module == "classifiers"}
# Names of the language model alone differ: all else is that of the class above.
TEXT_OF_VISION = {name for name in MODELS if name.endswith("ForConditionalGeneration")}
ROWS = [
    (set(re.findall(r"`(\w+)`", cells[1])), cells[3].strip())
    for line in (ROOT / "docs" / "models.md").read_text().splitlines()
    if len(cells := line.split("|")) == 5
]


@pytest.mark.parametrize("name", MODELS)
def test_it_is_compared_recorded_and_split(name: str) -> None:
    if name in TEXT_OF_VISION:
        if name in IMAGE_READERS:  # compared with images, in steps of all sorts, in tests/server/images
            assert name in {case.architecture for case in CASES.values()}
            return
        own = {key for key in vars(model_class(name)) if not key.startswith("__")}
        assert own <= {"checkpoint_names", "leaves_out", "stacked_experts"}, "what is more needs a case of its own"
        name = next(base.__name__ for base in model_class(name).__mro__ if base.__name__ not in TEXT_OF_VISION)
    for test in ELSEWHERE.get(name, ()):
        stem = re.sub("ForCausalLM$", "", name).lower()
        assert stem in (Path(__file__).parent / f"{test}.py").read_text(), f"{test} lacks {name}"
    assert name in FIRST_CASES or name in ELSEWHERE


@pytest.mark.parametrize("name", MODELS)
def test_it_has_a_row_in_the_docs_that_says_whether_gguf_files_are_read(name: str) -> None:
    (stated,) = [gguf for names, gguf in ROWS if name in names]
    kinds = ("Model", "ForMaskedLM", "ForSequenceClassification")  # all of which a file of an encoder holds alike
    encoders = {f"{begin}{kind}" for _, begin in GGUF_ENCODERS.values() for kind in kinds}
    read = name in encoders | {class_name for _, class_name in ARCHITECTURES.values()}
    assert stated != "", "GGUF: yes, no, or what is read"
    assert stated != "no" if read else stated != "yes"


def test_gguf_files_of_all_encoders_are_compared() -> None:
    """With the checkpoint in gguf/test_encoders, with llama.cpp in gguf/test_llama_cpp."""
    assert set(GGUF_ENCODERS) == {*ENCODER_FILES.values(), "bert"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_its_gguf_files_are_compared(arch: str) -> None:
    """With transformers in test_family_files and test_files, with llama.cpp in test_llama_cpp; or in its own test."""
    if (own := Path(__file__).parent / f"test_{arch.replace('-', '_')}.py").exists():
        assert f'"{arch}"' in own.read_text(), "its test must name the architecture"
        assert re.search(r"GGUFWriter|from support\.gguf_", own.read_text()), "its test must write a file"
        return
    assert arch in FAMILIES or arch in {layout.arch for layout in LAYOUTS.values()}
