"""The engine: requests become steps, steps run on the device, and their tokens come back.

Read it in this order.

1. Between the parts: `messages` is the data that enters and leaves the core, and goes from the scheduler to the runner.
2. Planning: `core` adds requests and makes steps; `scheduler` decides what a step computes; `request_table` queues
   requests, `request` is one of them; `kv_cache`, `block_pool` and `cache_resource` hold the blocks; `steps` are a step
   in the making and in flight.
3. On the device: `executor` and `control` lead to the `runner`, which has a row for each running request
   (`request_states`), makes a batch (`input_batch`, with the kernels of `step_kernels`), runs it by a CUDA graph
   (`step_graphs`) or the `forward`, and samples (`step_sampling`).
4. The start: `load_model` compiles a model and reads its weights, `warm_up` runs every kind of batch, `cache_memory`
   sizes the KV cache.

Names of tensors end in their dimensions: T tokens and R rows of a batch, padding included (R1: R + 1), S rows of the
states, L tokens of a request, K guesses or rows of tokens, B blocks, D hidden size, V vocabulary, W words of a work
list, digits as they are. The packages `compiled_engine.graphs`, `passes` and `models` are folders at the top of the
repository.

Features plug in at `plan_hooks` and `step_hooks`, and are in `compiled_engine/features`.
"""
