"""Several processes that train one model: who they are, what they agree on, what they send each other."""
