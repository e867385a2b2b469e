"""The life of every shard: state, copies, leases, working set, streaming, updates. Knows no hyper-parameter."""
