"""The names of vLLM that TRL's client imports; its communicator sends over gloo, so that no GPU is needed."""

__version__ = "0.30.0"

LLM = RequestOutput = SamplingParams = None  # imported by TRL, and not used by its client
