"""What tests of drafters that learn share."""

import torch
from torch import Tensor

from spec_trl.papers.test_time_speculation.distilled_drafter import DistilledDrafter
from tests.generation.calls import pad_left, random_rows


BATCH = pad_left(random_rows([5, 9, 1, 12, 7, 4]))
ALONE = pad_left(random_rows([9]))


def weights_of(drafter: DistilledDrafter) -> list[Tensor]:
    student = drafter.student
    return [parameter.detach().clone() for parameter in student.trained(student.network)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
