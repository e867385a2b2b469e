"""What autograd keeps between forward and backward: its ledger, and what is really resident."""
