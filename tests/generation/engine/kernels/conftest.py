import pytest
import torch


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter stores bfloat16 as integers of 16 bits, and tl.dot there multiplies these integers."""
    tl = pytest.importorskip("triton.language", reason="Triton is not installed")
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def create_dot(builder, *operands_and_options):
        operands = [builder.cast_impl(operand, tl.float32) for operand in operands_and_options[:3]]
        return multiply(builder, *operands, *operands_and_options[3:])

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
