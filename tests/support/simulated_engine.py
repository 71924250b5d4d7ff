"""A scheduler driven by a fake runner, and everything that must hold of what it lets out, checked as it runs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

from fake_runner import VOCAB_SIZE, FakeRunner, logprobs_of, next_token, prefix_hashes, shares_of
from lagging_copies import LaggingCopies

from compiled_engine.config import CacheConfig, SchedulerConfig
from compiled_engine.engine.messages import EngineRequest, RunnerOutput, SchedulerOutput, StepOutputs
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.features.pipeline.micro_batches import MicroBatches
from compiled_engine.features.prompt_logprobs.extras import rows_in
from compiled_engine.features.prompt_logprobs.plan import PromptLogprobs
from compiled_engine.features.recurrence.snapshots import StateSnapshots
from compiled_engine.features.speculation.draft_length import DraftLength
from compiled_engine.features.speculation.draft_plan import DraftPlan
from compiled_engine.features.structured.plan import Structured
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import TokenLogprobs
from compiled_engine.sampling.token_mask import TokenMask, ask


@dataclass
class Record:
    """A request, the output that is expected of it, and the output so far."""

    request: EngineRequest
    token_mask: TokenMask | None
    order: tuple[int, int]
    expected: tuple[list[int], str, int | str | None]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    num_admissions: int = 0


def new_ids(step: SchedulerOutput) -> list[str]:
    return [request.request_id for request in step.new]


def outputs_of(max_tokens: int | None, **rest: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **rest)


class SimulatedEngine:
    """A scheduler and a fake runner. A step is `begin_step` (schedule, execute), then `finish_step` (update).

    Requests may come between the two. Up to `steps_in_flight` steps are begun and not finished. A result is known to
    the scheduler no sooner than the step is finished. max_new_tokens_per_step, yields, num_snapshots: see FakeRunner.
    draft_length: see DraftPlan. snapshots: those that another feature knows too. further: features besides those that
    the other arguments ask for. copies: those of KV offload, for which requests wait while others overtake them.
    """

    def __init__(
        self,
        *,
        block_size: int = 4,
        num_blocks: int = 16,
        budget: int = 64,
        max_prefill_tokens: int | None = None,
        max_num_seqs: int = 8,
        max_model_len: int = 64,
        policy: str = "fcfs",
        prefix_caching: bool = True,
        steps_in_flight: int = 1,
        num_micro_batches: int = 1,
        max_new_tokens_per_step: int = 1,
        yields: Callable[[int], int] = lambda most: 1,
        num_snapshots: int = 0,
        snapshots: StateSnapshots | None = None,
        draft_length: DraftLength | None = None,
        further: Sequence[PlanFeature] = (),
        copies: LaggingCopies | None = None,
    ) -> None:
        config = SchedulerConfig(max_num_seqs, budget, max_model_len, policy, max_prefill_tokens=max_prefill_tokens)
        cache = CacheConfig(block_size, None, 0.9, prefix_caching)
        if snapshots is None and num_snapshots and prefix_caching:
            snapshots = StateSnapshots(num_snapshots, block_size, least_gain=1)
        self.structured = Structured(max_num_seqs, VOCAB_SIZE)
        features: list[PlanFeature] = [self.structured, PromptLogprobs(VOCAB_SIZE)]
        if (most := max_new_tokens_per_step - 1) > 0:
            features.append(DraftPlan(most, max_num_seqs, steps_in_flight, length=draft_length))
        if num_micro_batches > 1:
            features.append(
                MicroBatches(num_micro_batches, min(max_num_seqs, budget // max_new_tokens_per_step), steps_in_flight)
            )
        if snapshots is not None:
            features.append(snapshots)
        features += further
        self.scheduler = Scheduler(
            *(config, cache, num_blocks, VOCAB_SIZE, steps_in_flight, max_new_tokens_per_step),
            features=features,
        )
        self.max_new_tokens_per_step = max_new_tokens_per_step
        self.copies = copies
        self.steps_in_flight = steps_in_flight
        self.most_unknown = 2 if steps_in_flight > num_micro_batches else 1
        # A prompt that is cut for a snapshot leaves tokens to another one, and both may not fit into the next step.
        serves_all = num_micro_batches == max_new_tokens_per_step == 1 and snapshots is None
        self.runner = FakeRunner(
            num_blocks,
            block_size,
            max_num_seqs,
            budget,
            serves_all,
            max_new_tokens_per_step,
            yields=yields,
            num_snapshots=0 if snapshots is None else snapshots.num_slots,
            adapts=draft_length is not None,
            copies=copies,
        )
        self.max_total_tokens = min(max_model_len, num_blocks * block_size + 1)
        self.longest_prompt = min(max_model_len, num_blocks * block_size) - 1
        self.by_priority = policy == "priority"
        self.live: dict[str, Record] = {}
        self.waiting: set[str] = set()
        self.ended: list[Record] = []
        self.in_flight: deque[tuple[SchedulerOutput, RunnerOutput, list[Record]]] = deque()
        self.unmasked: tuple[SchedulerOutput, list[Record]] | None = None
        self.masks_begun: tuple[SchedulerOutput, set[str]] | None = None
        self.num_arrived = 0
        self.num_preemptions = 0
        self.max_request_tokens = 1

    def add(
        self,
        request_id: str,
        prompt: list[int],
        *,
        priority: int = 0,
        eos: frozenset[int] = frozenset(),
        params: SamplingParams | None = None,
    ) -> Record:
        params = params or SamplingParams()
        token_mask, params = params.token_mask, replace(params, token_mask=None)
        request = EngineRequest(request_id, tuple(prompt), params, eos, priority)
        held = self.structured.holds_back(request, token_mask)
        assert not held, "only grammars are awaited"
        self.scheduler.add(request)
        self.runner.token_masks.pop(request_id, None)
        if token_mask is not None:
            self.runner.token_masks[request_id] = token_mask
        order = (priority if self.by_priority else 0, self.num_arrived)
        record = Record(request, token_mask, order, expected_output(request, token_mask, self.max_total_tokens))
        self.num_arrived += 1
        self.live[request_id] = record
        self.waiting.add(request_id)
        self.max_request_tokens = max(self.max_request_tokens, len(prompt) + len(record.expected[0]))
        self.scheduler.check_integrity()
        return record

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort(request_id)
        record = self.live.pop(request_id, None)
        if record is None:
            assert output is None
            return
        self.waiting.discard(request_id)
        assert output is not None
        assert (output.new_token_ids, output.finish_reason) == ((), "abort")
        assert output.num_cached_tokens == (record.num_cached_tokens or 0)
        assert record.token_ids == record.expected[0][: len(record.token_ids)]
        record.finish_reason = "abort"
        self.ended.append(record)
        self.scheduler.check_integrity()

    def begin_step(self) -> SchedulerOutput:
        """Begin a step, which must compute something."""
        step = self.try_step()
        assert step is not None, "nothing is computed"
        return step

    def try_step(self) -> SchedulerOutput | None:
        """Begin a step and return it.

        Returns None if all requests wait for a step in flight, or if the newest step waits for its masks.
        """
        if self.unmasked is not None:
            return None
        step = self.scheduler.schedule()
        self._take_masks()
        self.scheduler.check_integrity()
        if step is None:
            assert self.in_flight or not self.live or self.copies is not None, (
                "requests are left, but nothing is computed"
            )
            self._note_preemptions()
            return None
        assert step.request_ids
        records = [self.live[request_id] for request_id in step.request_ids]
        self._check_order(step)
        self.in_flight.append((step, self.runner.execute(step), records))
        sampled = Counter(id(r) for step, _, records in self.in_flight for r in compress(records, step.samples))
        assert max(sampled.values(), default=0) <= self.most_unknown, "a request is in too many steps at a time"
        self.unmasked = (step, records) if step.samples_late else None
        self._begin_masks()
        return step

    def _note_preemptions(self) -> None:
        """Record preemptions of a call that gave no step.

        A request may be preempted for another one that then finds no blocks either.
        """
        count = int(self.scheduler.metrics()["preemptions"]) - self.num_preemptions
        running = [i for i in self.live if i not in self.waiting and not self._is_ending(i)]
        running.sort(key=lambda request_id: self.live[request_id].order)
        self.waiting |= {*running[len(running) - count :]}
        self.num_preemptions += count

    def _begin_masks(self) -> None:
        """Begin the masks of the newest step if it awaits masks and all tokens before it are known.

        They are known if it is the oldest step in flight.
        """
        if self.unmasked is None:
            return
        step, records = self.unmasked
        if self.scheduler.knows_tokens_before(step):
            ended = {record.request.request_id for record in records if record.finish_reason is not None}
            self.scheduler.begin_late(step)
            self.unmasked, self.masks_begun = None, (step, ended)
        else:
            assert step is not self.in_flight[0][0]

    def _take_masks(self) -> None:
        """Finish masks that were begun, and pass them to the runner with the requests that had ended by then."""
        if self.masks_begun is not None:
            (step, ended), self.masks_begun = self.masks_begun, None
            self.runner.check_masks(step, self.scheduler.finish_late(), ended)

    def _check_order(self, step: SchedulerOutput) -> None:
        """Assert strict order: no request is admitted before an earlier one, and the last one is preempted."""
        new = {request.request_id for request in step.new}
        # A removed request that is still alive was preempted, unless its id was aborted and then added again, or
        # its last token is in flight.
        preempted = {i for i in step.removed if i in self.live and i not in self.waiting and not self._is_ending(i)}
        assert not (new and preempted), "admits while blocks are short"
        assert new <= self.waiting
        self.waiting = self.waiting - new | preempted
        self.num_preemptions += len(preempted)
        running = [self.live[share.request_id].order for share in shares_of(step)]
        waiting = [self.live[request_id].order for request_id in self.waiting]
        if new and waiting and self.copies is None:
            assert max(self.live[request_id].order for request_id in new) < min(waiting)
        if preempted:
            assert min(self.live[request_id].order for request_id in preempted) > max(running)
        starts = {share.request_id: share.num_computed_tokens for share in shares_of(step)}
        for request_id in new:
            record = self.live[request_id]
            record.num_admissions += 1
            if record.num_admissions == 1:
                record.num_cached_tokens = starts[request_id]
            wants_prompt_logprobs = record.request.sampling_params.prompt_logprobs is not None
            if wants_prompt_logprobs and len(record.prompt_logprobs) < len(record.request.prompt_token_ids) - 1:
                assert starts[request_id] == 0, "prompt tokens are skipped whose logprobs are asked for"

    def _is_ending(self, request_id: str) -> bool:
        if self.max_new_tokens_per_step > 1 and not all(step.single for step, _, _ in self.in_flight):
            return False  # a length cannot be foreseen
        record = self.live[request_id]
        params, num_prompt_tokens = record.request.sampling_params, len(record.request.prompt_token_ids)
        num_tokens = len(record.token_ids)
        for step, _, records in self.in_flight:
            num_tokens += any(r is record for r in compress(records, step.samples))
        return num_tokens == min(params.max_tokens or self.max_total_tokens, self.max_total_tokens - num_prompt_tokens)

    def finish_step(self) -> StepOutputs:
        """Update the scheduler with the result of the oldest step in flight."""
        self._take_masks()
        step, result, records = self.in_flight.popleft()
        outputs = self.scheduler.update(step, result)
        self._take(step, records, outputs)
        self._begin_masks()
        return outputs

    def fail_step(self, *, launching: bool = False) -> None:
        """Let the steps in flight fail as if they had written nothing: their requests end, waiting requests continue.

        `launching`: one more step fails that the runner never gets.
        """
        if launching and len(self.in_flight) < self.steps_in_flight and self.unmasked is None:
            step = self.scheduler.schedule()
            if step is not None:
                records = [self.live[request_id] for request_id in step.request_ids]
                self._check_order(step)
                self._forget(records)
            else:
                self._note_preemptions()
        self.runner.fail(step.step for step, _, _ in self.in_flight)
        for _, _, records in self.in_flight:
            self._forget(records)
        self._forget([record for request_id, record in self.live.items() if request_id not in self.waiting])
        self.in_flight.clear()
        self.unmasked = self.masks_begun = None
        self.scheduler.fail_step()
        self.scheduler.check_integrity()

    def _forget(self, records: list[Record]) -> None:
        for record in records:
            if record.finish_reason is None:
                record.finish_reason = "abort"
                self.ended.append(record)
                del self.live[record.request.request_id]
                self.waiting.discard(record.request.request_id)

    def step(self) -> StepOutputs:
        """Begin steps up to steps_in_flight, then finish the oldest, as EngineCore does."""
        while len(self.in_flight) < self.steps_in_flight and self.try_step() is not None:
            pass
        return self.finish_step() if self.in_flight else StepOutputs()

    def run(self) -> None:
        """Step until every request has ended. Asserts that the number of steps is bounded."""
        steps_left = len(self.live) * (self.max_request_tokens + 1) * 2 * self.steps_in_flight + self.steps_in_flight
        if self.max_new_tokens_per_step > 1:
            steps_left *= 8  # many yield nothing
        if self.copies is not None:
            steps_left *= 20  # copies take time
        while self.scheduler.has_unfinished():
            assert steps_left > 0, "requests do not end"
            steps_left -= 1
            self.step()
        if self.copies is not None:  # those of aborted requests end
            lag, self.copies.lag = self.copies.lag, 0.0
            for reconsiders in self.scheduler.hooks.reconsiders:
                reconsiders()
            self.copies.lag = lag
        self.check_idle()
        while self.in_flight:
            assert not self.finish_step(), "a step that nobody waits for has outputs"
        self.check_idle()

    def check_idle(self) -> None:
        metrics = self.scheduler.metrics()
        assert not self.live
        assert (metrics["running"], metrics["waiting"], metrics["kv_usage"]) == (0, 0, 0)
        assert metrics["blocks_free"] == metrics["blocks_total"] == self.runner.num_blocks
        assert metrics["preemptions"] == self.num_preemptions
        assert metrics["finished"] + metrics["aborted"] == len(self.ended) == self.num_arrived
        self.scheduler.check_integrity()

    def _take(self, step: SchedulerOutput, records: list[Record], outputs: StepOutputs) -> None:
        assert len({output.request_id for output in outputs}) == len(outputs)
        record_of = {record.request.request_id: record for record in records}
        for output in outputs:
            record = self.live[output.request_id]
            assert record is record_of[output.request_id], "an output goes to a request that took over an id"
            params = record.request.sampling_params
            assert output.new_token_ids or output.extras or output.finish_reason == "error"
            if output.num_cached_tokens is not None or not record.token_ids:
                assert output.num_cached_tokens == record.num_cached_tokens
            record.token_ids += output.new_token_ids
            if params.logprobs is not None:
                assert output.logprobs is not None or not output.new_token_ids
                record.logprobs += output.logprobs or ()
            if (found := rows_in(output.extras)) is not None:
                first, entries = found
                assert first == len(record.prompt_logprobs) + 1
                record.prompt_logprobs += entries
            if params.prompt_logprobs is not None and record.token_ids:
                assert len(record.prompt_logprobs) == len(record.request.prompt_token_ids) - 1
            if output.finish_reason is not None:
                record.finish_reason, record.stop_reason = output.finish_reason, output.stop_reason
                del self.live[output.request_id]
                self.waiting.discard(output.request_id)  # its last token came after it was preempted
                self._check_finished(record)
        self.scheduler.check_integrity()
        sampled = set(compress(step.request_ids, step.samples))
        assert {o.request_id for o in outputs if o.new_token_ids} <= sampled

    def _check_finished(self, record: Record) -> None:
        assert (record.token_ids, record.finish_reason, record.stop_reason) == record.expected
        prompt, params = record.request.prompt_token_ids, record.request.sampling_params
        tokens = [*prompt, *record.token_ids]
        entries = [logprobs_of(h, t) for h, t in zip(prefix_hashes(tokens[:-1]), tokens[1:], strict=True)]
        wanted = entries[: len(prompt) - 1] if params.prompt_logprobs is not None else []
        assert record.prompt_logprobs == wanted
        assert record.logprobs == (entries[len(prompt) - 1 :] if params.logprobs is not None else [])
        self.ended.append(record)


def expected_output(
    request: EngineRequest, token_mask: TokenMask | None, max_total_tokens: int
) -> tuple[list[int], str, int | str | None]:
    """Return the tokens that the fake model generates for a request that runs alone, and how they end."""
    params, prompt = request.sampling_params, request.prompt_token_ids
    *_, prefix = prefix_hashes(prompt)
    output: list[int] = []
    while True:
        if token_mask is not None:
            try:
                ask(token_mask, output, VOCAB_SIZE)
            except ValueError as error:
                return output, "error", str(error)
        token = next_token(prefix, token_mask, output)
        prefix = hash((prefix, token))
        output.append(token)
        may_stop = len(output) >= params.min_tokens
        if may_stop and token in request.eos_token_ids and not params.ignore_eos:
            return output, "stop", None
        if may_stop and token in (params.stop_token_ids or ()):
            return output, "stop", token
        if len(output) == params.max_tokens or len(prompt) + len(output) == max_total_tokens:
            return output, "length", None
