"""What is large is imported without garbage collection, which goes on afterwards."""

import gc

import pytest

from sluice.imports import large_imports


def test_the_collector_is_off_while_a_block_imports_and_as_before_at_its_end() -> None:
    assert gc.isenabled()
    with large_imports():
        assert not gc.isenabled()
        with large_imports():
            pass
        assert not gc.isenabled(), "a block inside of another leaves it off"
    assert gc.isenabled()
    with pytest.raises(ImportError), large_imports():
        raise ImportError
    assert gc.isenabled()
