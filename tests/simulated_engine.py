"""A scheduler driven by a fake runner, and everything that must hold of what it lets out, checked as it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from fake_runner import FakeRunner, logprobs_of, next_token, prefix_hashes

from compiled_engine.config import CacheConfig, SchedulerConfig
from compiled_engine.engine_io import EngineOutput, EngineRequest
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.scheduling.scheduler import Scheduler
from compiled_engine.scheduling.step import RunnerOutput, SchedulerOutput, TokenLogprobs


@dataclass
class Record:
    """A request, what should come out of it, and what did."""

    request: EngineRequest
    order: tuple[int, int]
    expected: tuple[list[int], str, int | None]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int | None = None
    num_admissions: int = 0


class SimulatedEngine:
    """`step` is `begin_step` (schedule) and `finish_step` (execute and update); requests may come between."""

    def __init__(
        self,
        *,
        block_size: int = 4,
        num_blocks: int = 16,
        budget: int = 64,
        max_num_seqs: int = 8,
        max_model_len: int = 64,
        policy: str = "fcfs",
        prefix_caching: bool = True,
    ) -> None:
        config = SchedulerConfig(max_num_seqs, budget, max_model_len, policy)
        self.scheduler = Scheduler(config, CacheConfig(block_size, None, 0.9, prefix_caching), num_blocks)
        self.runner = FakeRunner(num_blocks, block_size, max_num_seqs, budget)
        self.max_total_tokens = min(max_model_len, num_blocks * block_size + 1)
        self.longest_prompt = min(max_model_len, num_blocks * block_size) - 1
        self.by_priority = policy == "priority"
        self.live: dict[str, Record] = {}
        self.waiting: set[str] = set()
        self.ended: list[Record] = []
        self.in_flight: SchedulerOutput | None = None
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
        request = EngineRequest(request_id, tuple(prompt), params or SamplingParams(), eos, priority)
        self.scheduler.add(request)
        order = (priority if self.by_priority else 0, self.num_arrived)
        record = Record(request, order, expected_output(request, self.max_total_tokens))
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
        step = self.in_flight = self.scheduler.schedule()
        assert step.scheduled or not self.live, "requests are left, but nothing is computed"
        self._check_order(step)
        self.scheduler.check_integrity()
        return step

    def _check_order(self, step: SchedulerOutput) -> None:
        """Served strictly in order: nobody is admitted past one who waits, and the last one is preempted."""
        new = {request.request_id for request in step.new}
        # A removed request that is still alive was preempted, unless its id was aborted and then added again.
        preempted = {i for i in step.removed if i in self.live and i not in self.waiting}
        assert not (new and preempted), "admits while blocks are short"
        assert new <= self.waiting
        self.waiting = self.waiting - new | preempted
        self.num_preemptions += len(preempted)
        running = [self.live[share.request_id].order for share in step.scheduled]
        waiting = [self.live[request_id].order for request_id in self.waiting]
        if new and waiting:
            assert max(self.live[request_id].order for request_id in new) < min(waiting)
        if preempted:
            assert min(self.live[request_id].order for request_id in preempted) > max(running)
        starts = {share.request_id: share.num_computed_tokens for share in step.scheduled}
        for request_id in new:
            record = self.live[request_id]
            record.num_admissions += 1
            if record.num_admissions == 1:
                record.num_cached_tokens = starts[request_id]
            wants_prompt_logprobs = record.request.sampling_params.prompt_logprobs is not None
            if wants_prompt_logprobs and len(record.prompt_logprobs) < len(record.request.prompt_token_ids) - 1:
                assert starts[request_id] == 0, "prompt tokens are skipped whose logprobs are asked for"

    def finish_step(self) -> list[EngineOutput]:
        step, self.in_flight = self.in_flight, None
        assert step is not None
        outputs = self.scheduler.update(step, self.runner.execute(step))
        self._take(step, outputs)
        return outputs

    def fail_step(self) -> None:
        """The runner fails before it computes anything: all ids of the step are aborted, the others go on."""
        step, self.in_flight = self.in_flight, None
        assert step is not None
        self.runner.receive(step)
        for share in step.scheduled:
            self.abort(share.request_id)
        assert self.scheduler.update(step, RunnerOutput({})) == []
        self.scheduler.check_integrity()

    def step(self) -> list[EngineOutput]:
        self.begin_step()
        return self.finish_step()

    def run(self) -> None:
        """Until every request has ended, in a number of steps that rules out that they hinder one another forever."""
        steps_left = len(self.live) * (self.max_request_tokens + 1) * 2
        while self.scheduler.has_unfinished():
            assert steps_left > 0, "requests do not end"
            steps_left -= 1
            self.step()
        self.check_idle()

    def check_idle(self) -> None:
        metrics = self.scheduler.metrics()
        assert not self.live
        assert (metrics["running"], metrics["waiting"], metrics["kv_usage"]) == (0, 0, 0)
        assert metrics["blocks_free"] == metrics["blocks_total"] == self.runner.num_blocks
        assert metrics["preemptions"] == self.num_preemptions
        assert metrics["finished"] + metrics["aborted"] == len(self.ended) == self.num_arrived
        self.scheduler.check_integrity()

    def _take(self, step: SchedulerOutput, outputs: list[EngineOutput]) -> None:
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            record = self.live[output.request_id]
            params = record.request.sampling_params
            assert output.new_token_ids or output.prompt_logprobs
            assert output.num_cached_tokens == record.num_cached_tokens
            record.token_ids += output.new_token_ids
            record.logprobs += output.logprobs or ()
            if output.prompt_logprobs is not None:
                first, entries = output.prompt_logprobs
                assert first == len(record.prompt_logprobs) + 1
                record.prompt_logprobs += entries
            if params.prompt_logprobs is not None and record.token_ids:
                assert len(record.prompt_logprobs) == len(record.request.prompt_token_ids) - 1
            if output.finish_reason is not None:
                record.finish_reason, record.stop_reason = output.finish_reason, output.stop_reason
                del self.live[output.request_id]
                self._check_finished(record)
        self.scheduler.check_integrity()
        sampled = {share.request_id for share in step.scheduled if share.samples}
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


def expected_output(request: EngineRequest, max_total_tokens: int) -> tuple[list[int], str, int | None]:
    """What the fake model generates for a request that has the engine to itself: tokens and how they end."""
    params, prompt = request.sampling_params, request.prompt_token_ids
    *_, prefix = prefix_hashes(prompt)
    output: list[int] = []
    while True:
        token = next_token(prefix)
        prefix = hash((prefix, token))
        output.append(token)
        may_stop = len(output) >= params.min_tokens
        if may_stop and token in request.eos_token_ids and not params.ignore_eos:
            return output, "stop", None
        if may_stop and token in (params.stop_token_ids or ()):
            return output, "stop", token
        if len(output) == params.max_tokens or len(prompt) + len(output) == max_total_tokens:
            return output, "length", None
