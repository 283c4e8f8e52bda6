"""Tests for test_apart.py, which runs them. They need no GPU, in spite of their mark."""

import os

import pytest
from programs import APART

pytestmark = [pytest.mark.gpu, pytest.mark.apart(programs=2, seconds=1)]


@pytest.mark.parametrize("name", ["one", "two words", "x/y"])
def test_passes(name: str) -> None:
    assert APART in os.environ, name


def test_fails() -> None:
    pytest.fail("as it should")


@pytest.fixture
def broken() -> None:
    raise RuntimeError("a fixture that raises")


@pytest.mark.usefixtures("broken")
def test_errors() -> None:
    pass


def test_skips() -> None:
    pytest.skip("one GPU")
