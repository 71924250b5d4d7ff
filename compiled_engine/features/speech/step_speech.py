"""Encodes the clips of a step on the device, before the step, and keeps each clip's keys and values in its slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from compiled_engine.engine.input_batch import InputBatch
from compiled_engine.engine.messages import NewRequest, SchedulerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_hooks import RunnerParts, StepFeature
from compiled_engine.features.speech.extras import FEATURES, NAME, SAMPLES, ClipInputs, blank_clip, new_clips_of
from compiled_engine.features.speech.log_mel import ClipFeatures, LogMel
from compiled_engine.features.speech.token_rules import TokenRules
from compiled_engine.graphs.compiler.signature import ENCODE, HOISTED, Signature, callables_of
from compiled_engine.models.foreign.speech_inputs import CLIP, NO_CLIP, encoder_inputs
from compiled_engine.passes.speech.hoist_encoder import cross_parameters
from compiled_engine.process.progress import Progress
from compiled_engine.rows.row_fields import RowField
from compiled_engine.rows.staged_writes import upload
from compiled_engine.speech import SpeechConfig, SpeechDescription


class StepSpeech(StepFeature):
    """Runs the encoder for the clips of a step, and stores on the device which slot has each request's clip.

    encode, hoisted: the model's callables; `hoisted` computes keys and values from the result of `encode`. kept: the
    buffers of keys and values of the first layer, then of the next ones, [slots * length, H, d] each. rules: None if
    the checkpoint states no rules.
    """

    name = NAME

    def __init__(
        self,
        config: SpeechConfig,
        speech: SpeechDescription,
        signature: Signature,
        encode: Callable[..., torch.Tensor],
        hoisted: Callable[..., Sequence[torch.Tensor]],
        kept: Sequence[torch.Tensor],
        states: RequestStates,
        rules: TokenRules | None = None,
    ) -> None:
        self._config, self._speech, self._signature = config, speech, signature
        self._encode, self._hoisted, self._states = encode, hoisted, states
        self._kept = [tensor.unflatten(0, (config.num_slots, speech.length)) for tensor in kept]
        self._on_host = {tensor.name for tensor in signature.tensors if tensor.on_host}
        dtype, self._device = kept[0].dtype, kept[0].device
        log_mel = None if config.mel is None else LogMel(config.mel, speech.num_mel_bins, self._device)
        self._features = ClipFeatures(log_mel, dtype, self._device)
        states.fields.declare(RowField(CLIP, initial=NO_CLIP))
        self._rules, self._num_runs = rules, 0

    @classmethod
    def of(cls, parts: RunnerParts, config: SpeechConfig, speech: SpeechDescription) -> StepSpeech:
        """Make the feature of a runner, and add the rules of transcriptions to the runner's sampler."""
        model, rules = parts.config.model, None
        if config.rules is not None:
            rules = TokenRules(config.rules, parts.states.fields)
            parts.sampler.add_processor(rules)
        names = [
            each.name
            for layer in range(model.num_layers)
            for each in cross_parameters(layer, 0, model.num_kv_heads, model.head_dim, model.dtype)
        ]
        return cls(
            config,
            speech,
            callables_of(parts.config)[ENCODE],
            parts.model.ends[ENCODE],
            parts.model.ends[HOISTED],
            [parts.tensors[name] for name in names],
            parts.states,
            rules,
        )

    def start_up(self, progress: Progress) -> int:
        """On a GPU, encode the most clips of a step. Return the peak of memory in bytes, 0 on a CPU."""
        if self._device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        most = min(self._config.step_clips, self._config.num_slots)
        if (mel := self._config.mel) is None:
            blank = blank_clip(FEATURES, self._speech.num_mel_bins, self._speech.num_frames)
        else:
            blank = blank_clip(SAMPLES, mel.num_samples)
            for count in range(1, most):  # each number of clips has its own plan of Fourier transforms
                self._features.of([blank] * count)
        self._run([blank] * most)
        return torch.cuda.max_memory_allocated(self._device) - before

    def added(self, row: int, request: NewRequest) -> None:
        self._states.fields.set(row, **{CLIP: request.extras[NAME]})

    def begin(self, step: SchedulerOutput) -> None:
        """Encode the step's new clips, and write their keys and values to their slots."""
        if not (new := new_clips_of(step.extras)):
            return
        results = self._run([clip.inputs for clip in new])
        slots_C = upload(torch.tensor([clip.slot for clip in new], dtype=torch.int64).numpy(), self._device)
        for kept_SLHd, new_EHd in zip(self._kept, results, strict=True):
            kept_SLHd.index_copy_(0, slots_C, new_EHd.reshape(len(new), *kept_SLHd.shape[1:]))
        self._num_runs += 1

    def after_sample(self, batch: InputBatch) -> None:
        if self._rules is not None:
            self._rules.took(batch.rows[batch.samples], self._states.last_token_S)

    def metrics(self) -> dict[str, Any]:
        return {"encoder_runs": self._num_runs}

    def _run(self, clips: Sequence[ClipInputs]) -> Sequence[torch.Tensor]:
        """Encode C clips. Return keys and values of the first layer, then of the next ones, [C * length, H, d] each."""
        inputs = encoder_inputs(self._speech, self._features.of(clips))
        given = {name: each if name in self._on_host else self._on_device(each) for name, each in inputs.items()}
        with torch.no_grad():
            return self._hoisted(self._encode(*self._signature.passed(given)))

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == self._device.type:
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
