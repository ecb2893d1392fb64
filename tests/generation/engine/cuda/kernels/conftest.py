import pytest


@pytest.fixture(autouse=True)
def in_order(products_in_order: None) -> None:
    """All kernels here multiply so."""
