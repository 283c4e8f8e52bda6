"""Tests that the mutations of `mutations.py`, which run apart from the other tests, still fit the code."""

from mutations import MUTATIONS, ROOT


def test_the_text_of_each_mutation_is_in_its_file_once() -> None:
    texts = {mutation.file: (ROOT / mutation.file).read_text() for mutation in MUTATIONS}
    stale = [mutation.old for mutation in MUTATIONS if texts[mutation.file].count(mutation.old) != 1]
    assert not stale
