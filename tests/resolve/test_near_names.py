from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_a_minute import in_a_minute

from compiled_engine.options import EngineOptions
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.schema import nearest, unknown_name_message

OPTIONS = [field.name for field in fields(EngineOptions)]
PARAMS = [field.name for field in fields(SamplingParams)]


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("max_num_seq", OPTIONS, "max_num_seqs"),
        ("max_model_length", OPTIONS, "max_model_len"),
        ("gpu_memory_utilisation", OPTIONS, "gpu_memory_utilization"),
        ("Mode", OPTIONS, "mode"),
        ("modle", OPTIONS, "model"),
        ("prefix_caching", OPTIONS, "enable_prefix_caching"),
        ("temprature", PARAMS, "temperature"),
        ("max_token", PARAMS, "max_tokens"),
        ("min_token", PARAMS, "min_tokens"),
    ],
)
def test_a_misspelling_is_recognised(name: str, known: list[str], meant: str) -> None:
    assert nearest(name, known) == meant


@pytest.mark.parametrize("name", ["enforce_eager", "swap_space", "wings", "", "x", "api_key", "hf_token"])
def test_a_name_that_is_near_to_none_has_no_proposal(name: str) -> None:
    assert nearest(name, OPTIONS) is None
    assert "mean" not in unknown_name_message("LLM has no option", name, OPTIONS)


@pytest.mark.parametrize("name", ["guided_decoding", "best_of", "use_beam_search", "max_new_tokens_total"])
def test_the_same_for_sampling_parameters(name: str) -> None:
    assert nearest(name, PARAMS) is None


def test_the_message_names_both() -> None:
    message = unknown_name_message("LLM has no option", "max_num_seq", OPTIONS)
    assert message == "LLM has no option 'max_num_seq'; did you mean 'max_num_seqs'?"


@given(st.sampled_from(OPTIONS), st.data())
def test_a_long_name_with_a_letter_missing_is_recognised(name: str, data: st.DataObject) -> None:
    if len(name) >= 8:
        index = data.draw(st.integers(0, len(name) - 1))
        assert nearest(name[:index] + name[index + 1 :], OPTIONS) is not None


def test_a_name_of_many_letters_costs_little() -> None:
    in_a_minute("""
from compiled_engine.schema import nearest
assert nearest("mode_lxz" * (1 << 22), [f"option_{number}" for number in range(100)]) is None
""")


@given(st.text(), st.lists(st.text()))
def test_what_is_proposed_is_known(name: str, known: list[str]) -> None:
    assert nearest(name, known) in {None, *known}
