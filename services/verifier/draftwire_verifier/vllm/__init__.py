"""vLLM as the engine of the verifier: its models and kernels, our rules. See docs/vllm.md.

Three parts. In vLLM's scheduler (`gate`, `gated_scheduler`) a request takes part in a step only with an item; on each
of its ranks (`rank_decisions`, `rank_extension`) the decision is taken by `draftwire.verification.deciding`; and
`vllm_engine` is what the verifier knows: a `StepEngine`. No file of vLLM is changed.
"""
