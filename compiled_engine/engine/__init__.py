"""The engine: plans steps for the requests, runs each step on the device, and returns the steps' tokens.

Read it in this order.

1. Between the parts: `messages` is the data that enters and leaves the core, and goes from the scheduler to the runner.
2. Planning: `core` adds requests and makes steps; `scheduler` decides what a step computes; `request_table` has the
   running and waiting requests, `request` describes one; `kv_cache`, `block_pool` and `cache_resource` manage the
   blocks; `steps` has the data of a step while it is planned and in flight.
3. On the device: `executor` and `control` lead to the `runner`, which has a row for each running request
   (`request_states`), makes a batch (`input_batch`, with the kernels of `step_kernels`), runs it by a CUDA graph
   (`step_graphs`) or the `forward`, and samples (`step_sampling`).
4. The start: `load_model` compiles a model and reads its weights, `warm_up` runs every kind of batch, `cache_memory`
   sizes the KV cache.

Names of tensors end in their dimensions: T tokens and R rows of a batch, padding included (R1: R + 1), S rows of the
request states, L tokens of a request, K guesses of a request or rows of a table of tokens, B blocks, D hidden size, V
vocabulary, W words of a work list. A digit is a size: tokens_2K has sizes 2 and K. The packages
`compiled_engine.graphs`, `passes` and `models` are folders at the top of the repository.

Features plug in at `plan_hooks` and `step_hooks`, and are in `compiled_engine/features`.
"""
