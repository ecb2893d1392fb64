"""A policy and one real calibration of it, which all tests of measuring share."""

import pytest
from transformers import LlamaForCausalLM

from spec_trl.papers.efficient_rollout.calibration import calibrate
from spec_trl.papers.efficient_rollout.profile import Profile
from tests.conftest import tiny_llama


@pytest.fixture(scope="session")
def policy() -> LlamaForCausalLM:
    """A target that no test may change."""
    return tiny_llama(hidden_size=32, intermediate_size=32).float()


@pytest.fixture(scope="session")
def profile(policy: LlamaForCausalLM) -> Profile:
    """A real one, of the policy; its coefficients are searched for only briefly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec_trl.papers.efficient_rollout.fit.GENERATIONS", 2)
        return calibrate(policy, max_batch_size=4, max_length=600, budget_seconds=0.1, progress=False)
