"""The user's ``nn.Module``: hooks, absent parameters, gradient handles, refusals. The only wing that touches it."""
