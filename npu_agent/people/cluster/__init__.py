"""A whole cluster as a person's kubeconfig shows it: for `kubectl npu`, never in the agent.

`objects` is what is read of the API server, `fetch` reads it by the person's kubectl (`proxy`);
`rows` and `why` are what is shown of it.
"""
