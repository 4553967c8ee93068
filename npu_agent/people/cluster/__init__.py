"""A whole cluster as a person's kubeconfig shows it: for `kubectl npu`, never in the agent.

`objects` is what is read of the API server, `fetch` reads it, `view` makes rows of it. Pure, but
for `fetch`.
"""
