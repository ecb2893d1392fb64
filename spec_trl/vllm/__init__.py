"""Drafts inside vLLM that follow the policy, for trainers with `use_vllm=True`. Nothing else imports this package.

    options of the trainer ── drafting.py ──> vLLM's speculative_config
    TRL's trainer ── generation.py ──> LLM in this process, or client.py ──> a server
    after an optimizer step: transport.py carries the policy, then the drafter, into vLLM's own update sessions
    in vLLM's processes (plugin.py): scheduler.py sets the draft length of a step, history.py drafts from old texts
    after a rollout: rollouts.py logs its drafts, and looks at the distance from the loss
    vllm_serve_command.py prints the line of a server

Sampled tokens have the distribution of vLLM without drafts; they are not the same tokens.
"""
