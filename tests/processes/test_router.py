"""Which replica a request goes to: where least is to be done for it, within bounds of load and of memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.engine.block_pool import hash_blocks
from compiled_engine.engine.messages import ROOT, Content, EngineRequest, prefix_root
from compiled_engine.processes.router import GENERATED, PrefixHistory, Route, Router
from compiled_engine.sampling.params import SamplingParams

BLOCK = 4


def request(number: int, prompt: list[int], max_tokens: int = 8, salt: str | None = None) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(str(number), tuple(prompt), params, prefix_root=prefix_root(salt=salt))


def make_router(replicas: int = 2, most: int = 1000, num_blocks: int = 64) -> Router:
    return Router(replicas, most, BLOCK, num_blocks)


def sent(router: Router, asked: EngineRequest) -> Route:
    route = router.route(asked)
    assert route is not None
    return route


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=40)
works = st.lists(st.tuples(prompts, st.integers(1, 50)), min_size=1, max_size=60)


@given(works, st.integers(1, 4))
def test_no_replica_has_much_more_to_do_than_another(given: list[tuple[list[int], int]], replicas: int) -> None:
    """By no more than the largest request, as prompts that are cached only make the work less."""
    router = make_router(replicas)
    work = [0.0] * replicas
    largest = 0.0
    for number, (prompt, max_tokens) in enumerate(given):
        route = sent(router, request(number, prompt, max_tokens))
        assert GENERATED * max_tokens <= route.work <= GENERATED * max_tokens + len(prompt)
        work[route.replica] += route.work
        largest = max(largest, GENERATED * max_tokens + len(prompt))
        assert max(work) - min(work) <= 2 * largest


@given(works, st.integers(1, 3), st.integers(1, 5), st.data())
def test_a_replica_has_no_more_requests_than_it_may(
    given: list[tuple[list[int], int]], replicas: int, most: int, data: st.DataObject
) -> None:
    router = make_router(replicas, most)
    routes: list[tuple[Route, EngineRequest]] = []
    for number, (prompt, max_tokens) in enumerate(given):
        asked = request(number, prompt, max_tokens)
        route = router.route(asked)
        assert (route is None) == (len(routes) == replicas * most)
        if route is not None:
            routes.append((route, asked))
        held = [sum(route.replica == replica for route, _ in routes) for replica in range(replicas)]
        assert max(held) <= most
        if routes and data.draw(st.booleans()):
            route, asked = routes.pop(data.draw(st.integers(0, len(routes) - 1)))
            router.end(route, asked, [1] * 5, finished=True)


def test_a_prompt_goes_where_its_beginning_is() -> None:
    router = make_router(num_blocks=1000)
    common = list(range(100))
    first = sent(router, request(0, common))
    router.end(first, request(0, common), [7] * 8, finished=True)
    for number in range(5):
        again = request(number, [*common, number])
        route = sent(router, again)
        assert route.replica == first.replica
        router.end(route, again, [], finished=True)
    other = sent(router, request(9, common, salt="another's"))
    assert other.replica != first.replica  # which was chosen last, and has nothing of this salt
    router.forget_prefixes()
    assert sent(router, request(10, [*common, 5])).work > len(common)


def test_a_prompt_with_log_probabilities_is_computed_wherever_it_goes() -> None:
    """Its beginning counts as work, and attracts it to no replica; nor is it where another finds its own."""
    router = make_router(num_blocks=1000)
    common = tuple(range(100))
    params = SamplingParams(max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    first = sent(router, request(0, list(common)))
    router.end(first, request(0, list(common)), [7] * 8, finished=True)
    asked = EngineRequest("1", common, params)
    route = sent(router, asked)
    assert (route.replica, route.work) == (1 - first.replica, 100 + 8 * GENERATED)


def test_a_beginning_that_many_ask_for_comes_to_be_on_all_replicas() -> None:
    router = make_router(num_blocks=1000)
    common = list(range(200))
    chosen = [sent(router, request(number, [*common, number])) for number in range(40)]
    on = [[route for route in chosen if route.replica == replica] for replica in (0, 1)]
    assert abs(len(on[0]) - len(on[1])) <= 200 / (8 * GENERATED) + 1
    for routes in on:
        assert routes[0].work > 200
        assert max(route.work for route in routes[1:]) < 200


def test_the_answer_of_a_conversation_counts_as_sent() -> None:
    router = make_router(num_blocks=1000)
    first = request(0, [1] * 20)
    answer = [2] * 30
    route = sent(router, first)
    router.end(route, first, answer, finished=True)
    second = sent(router, request(1, [*[1] * 20, *answer, 3, 3, 3]))
    assert second.replica == route.replica
    assert second.work == GENERATED * 8 + 53 - 48  # all but the last full block


def test_answers_are_taken_to_be_as_long_as_those_before() -> None:
    router = make_router()
    unknown = EngineRequest("x", (1, 2, 3), SamplingParams(max_tokens=100_000))
    for _ in range(300):
        route = sent(router, unknown)
        router.end(route, unknown, [1] * 10, finished=True)
    assert 3 + 9 * GENERATED < sent(router, unknown).work < 3 + 12 * GENERATED
    # One that ends by nothing but its length is as long as that.
    assert sent(router, request(0, [1, 2, 3], max_tokens=1000)).work == 3 + 1000 * GENERATED


@pytest.mark.parametrize(("known", "most", "left"), [(15, 20, 5), (20, 20, 0), (25, 20, 0)])
def test_what_has_been_generated_elsewhere_is_not_generated_again(known: int, most: int, left: int) -> None:
    """It is computed as a prompt is; also where it is longer than answers are taken to be."""
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    begun = EngineRequest("x", (1, 2, 3), params, output_token_ids=(4,) * known)
    assert sent(make_router(), begun).work == 3 + known + GENERATED * left


def test_an_answer_is_not_taken_to_be_longer_than_it_may_be() -> None:
    """However long those before were."""
    router = make_router()
    asked = EngineRequest("0", (1, 2), SamplingParams(max_tokens=3))
    assert sent(router, asked).work == 2 + GENERATED * 3


def test_what_was_cut_off_says_nothing_about_answers() -> None:
    router = make_router()
    unknown = EngineRequest("x", (1, 2, 3), SamplingParams(max_tokens=100_000))
    expected = sent(router, unknown).work
    for _ in range(300):
        route = sent(router, unknown)
        router.end(route, unknown, [1], finished=False)
    assert sent(router, unknown).work == expected


def test_what_has_ended_is_no_work_any_more() -> None:
    """Of two requests of a replica one ends: it has less to do than another again, and gets the next ones."""
    router = make_router()
    long, short = request(0, [1] * 8, 100), request(1, [2] * 8, 10)
    for number in range(2):
        router.route(request(10 + number, [3 + number], 40))  # a request each
    first = sent(router, long)
    assert [sent(router, request(20 + number, [5], 30)).replica for number in range(3)] == [1 - first.replica] * 3
    router.end(first, long, [1] * 5, finished=True)
    assert [sent(router, short).replica for _ in range(3)] == [first.replica] * 3


def test_what_goes_on_beside_what_has_ended_is_still_work() -> None:
    router = make_router()
    first = sent(router, request(0, [1], 30))
    ended, goes_on = (sent(router, request(number, [number], most)) for number, most in ((1, 10), (2, 50)))
    assert ended.replica == goes_on.replica == 1 - first.replica
    router.end(ended, request(1, [1], 10), [1] * 10, finished=True)
    assert sent(router, request(3, [3], 10)).replica == first.replica


def test_a_prompt_with_log_probabilities_attracts_none_after_its_end_either() -> None:
    router = make_router(num_blocks=1000)
    scored = EngineRequest("0", tuple(range(100)), SamplingParams(max_tokens=8, ignore_eos=True, prompt_logprobs=0))
    router.end(sent(router, scored), scored, [7] * 8, finished=True)
    assert sent(router, request(1, list(range(100)))).work == 100 + 8 * GENERATED


def test_a_replica_that_is_gone_gets_nothing() -> None:
    router = make_router(3)
    router.remove(1)
    assert {sent(router, request(number, [number])).replica for number in range(20)} == {0, 2}


def test_a_prompt_goes_where_the_same_contents_were_sent() -> None:
    router, params = make_router(), SamplingParams(max_tokens=1)

    def with_content(number: int, key: str) -> EngineRequest:
        return EngineRequest(str(number), (1,) * 40, params, contents=(Content(2, 30, key),))

    first, second = (sent(router, with_content(number, key)).replica for number, key in enumerate("ab"))
    assert first != second
    assert [sent(router, with_content(2 + n, key)).replica for n, key in enumerate("ba")] == [second, first]


@given(st.lists(st.lists(st.integers(0, 1), max_size=24), max_size=30), st.integers(1, 9))
def test_a_history_keeps_what_was_sent_last(sequences: list[list[int]], capacity: int) -> None:
    history = PrefixHistory(capacity)
    for tokens in sequences:
        hashes: list[bytes] = []
        hash_blocks(hashes, ROOT, tokens, BLOCK)
        assert len(hashes) == len(tokens) // BLOCK
        history.add(hashes)
        assert len(history) <= capacity
        assert history.num_known(hashes) == min(len(hashes), capacity)
        longer = list(hashes)
        hash_blocks(longer, ROOT, [*tokens, *[9] * BLOCK], BLOCK)
        assert longer[: len(hashes)] == hashes
        assert history.num_known(longer) == min(len(hashes), capacity)
