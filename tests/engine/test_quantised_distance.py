"""What the passes compute of a quantised checkpoint is as near to its codes' model as the dtype allows."""

from __future__ import annotations

import pytest
from quantised_distance import FORMATS_BY_NAME, OF_BFLOAT16, distance

# Sums in another order round some inputs to the neighbouring code, and those of the next layers follow. The model that
# is compared with is as far from itself when it computes in fp64.
OF_FLIPPED_CODES = 6e-4


@pytest.mark.product(one_in=10)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_distributions_are_those_of_the_decoded_model(name: str, dtype: str) -> None:
    rounds_inputs = "int8" in name
    found = distance(FORMATS_BY_NAME[name], dtype, windows=1)
    if dtype == "float32":
        assert found.kl <= (2 * OF_FLIPPED_CODES if rounds_inputs else 1e-6)
        assert found.greedy_same >= found.tokens * (0.98 if rounds_inputs else 0.999)
    elif not rounds_inputs:
        assert found.kl <= 2 * OF_BFLOAT16
        assert found.greedy_same >= 0.98 * found.tokens
    else:  # in bfloat16 most large inputs have a neighbouring code
        assert found.kl <= 0.02
